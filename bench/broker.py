"""Data-plane latency of the memory broker, and whether anything grows over many cycles.

`python -m bench.broker --cycles 10000` starts a broker process and runs full cycles against it:
allocate, fill, seal, acquire, read, release. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from common.config.deployment import Deployment
from common.ids import Epoch, Incarnation, Participant, RunId, Service, StepIndex, WeightsVersion
from common.step.plan import StepMode, StepPlan
from common.step.schedule import Schedule
from common.tensors.client import BrokerClient
from common.tensors.spec import DType, TensorSpec
from common.transport import open_channel
from protos.rollplex.v1 import broker_pb2 as pb
from protos.rollplex.v1.broker_pb2_grpc import BrokerStub

RUN = RunId("bench")
EPOCH = Epoch(1)
PRODUCER = Participant(service=Service.PREFIX_ENCODER)
CONSUMER = Participant(service=Service.LEARNER)
START_S = 30.0
SAMPLES = 10
"""How often memory and descriptors are looked at."""
_WARM_UP_CYCLES = 5_000
"""Enough to fill the broker's memory of ended leases, which is bounded."""


@dataclass
class Measurement:
    """Latencies in nanoseconds, one a cycle; growth, one a sample."""

    allocate_ns: list[int] = field(default_factory=list)
    acquire_release_ns: list[int] = field(default_factory=list)
    broker_rss_bytes: list[int] = field(default_factory=list)
    broker_fds: list[int] = field(default_factory=list)
    client_rss_bytes: list[int] = field(default_factory=list)
    client_fds: list[int] = field(default_factory=list)


async def measure(
    deployment: Deployment, broker_pid: int, *, cycles: int, size_bytes: int
) -> Measurement:
    """Run the cycles against a started broker."""
    producer = await BrokerClient.connect(
        deployment.broker_socket, PRODUCER, Incarnation("bench"), timeout_s=START_S
    )
    consumer = await BrokerClient.connect(deployment.broker_socket, CONSUMER, Incarnation("bench"))
    await begin(deployment)
    measurement = Measurement()
    broker, client = psutil.Process(broker_pid), psutil.Process()
    for _ in range(_WARM_UP_CYCLES):
        await cycle(producer, consumer, Measurement(), size_bytes=size_bytes)
    for number in range(cycles):
        if number % max(1, cycles // SAMPLES) == 0 or number == cycles - 1:
            measurement.broker_rss_bytes.append(broker.memory_info().rss)
            measurement.broker_fds.append(broker.num_fds())
            measurement.client_rss_bytes.append(client.memory_info().rss)
            measurement.client_fds.append(client.num_fds())
        await cycle(producer, consumer, measurement, size_bytes=size_bytes)
    await producer.close()
    await consumer.close()
    return measurement


async def begin(deployment: Deployment) -> None:
    """Open a run and begin an epoch, as the controller does."""
    channel = open_channel(deployment.grpc_address(Participant(service=Service.BROKER)))
    stub = BrokerStub(channel)
    plan = StepPlan(
        run_id=RUN,
        step=StepIndex(0),
        epoch=EPOCH,
        mode=StepMode.TRAIN,
        schedule=Schedule.SERIAL,
        weights_version=WeightsVersion(0),
        groups=(),
        samples_per_group=1,
    )
    await stub.OpenRun(pb.OpenRunRequest(run_id=RUN, epoch=0), timeout=START_S, wait_for_ready=True)
    await stub.BeginStep(pb.BeginStepRequest(plan=plan.to_proto()))
    await channel.close()


async def cycle(
    producer: BrokerClient, consumer: BrokerClient, measurement: Measurement, *, size_bytes: int
) -> None:
    """One lease from allocation to free."""
    started_ns = time.perf_counter_ns()
    lease = await producer.allocate(
        run_id=RUN,
        epoch=EPOCH,
        group=None,
        name="bench",
        tensors=[TensorSpec(name="bytes", dtype=DType.UINT8, shape=(size_bytes,))],
        consumers=[CONSUMER],
    )
    measurement.allocate_ns.append(time.perf_counter_ns() - started_ns)
    lease.buffer("bytes")[0] = 1
    lease.seal()
    await producer.reserve(RUN, "barrier", 0)  # answered after the seal: the wait is not measured
    started_ns = time.perf_counter_ns()
    (held,) = await consumer.acquire([lease.id], epoch=EPOCH)
    held.release()
    measurement.acquire_release_ns.append(time.perf_counter_ns() - started_ns)


def report(measurement: Measurement, *, cycles: int, size_bytes: int) -> dict[str, Any]:
    """The result as printed."""
    return {
        "benchmark": "broker",
        "cycles": cycles,
        "lease_bytes": size_bytes,
        "acquire_release_us": percentiles(measurement.acquire_release_ns),
        "allocate_us": percentiles(measurement.allocate_ns),
        "broker_rss_growth_bytes": growth(measurement.broker_rss_bytes),
        "broker_fds": measurement.broker_fds,
        "client_rss_growth_bytes": growth(measurement.client_rss_bytes),
        "client_fds": measurement.client_fds,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }


def percentiles(values_ns: list[int]) -> dict[str, float]:
    """Some percentiles, in microseconds."""
    ordered = sorted(values_ns)
    picks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {
        name: ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1000
        for name, share in picks.items()
    }


def growth(samples_bytes: list[int]) -> int:
    """From the first sample to the last."""
    return samples_bytes[-1] - samples_bytes[0]


def main() -> int:
    """Start a broker, measure, stop it, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=1 << 20, help="size of each lease")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollplex-bench-") as folder:
        config = Path(folder) / "deployment.toml"
        config.write_text(
            f'state_dir = "{folder}"\nhttp_port_base = 0\nlog_level = "error"\n'
            f'redis.url = "unix://{folder}/no-redis.sock"\n'
        )
        deployment = Deployment(state_dir=Path(folder))
        command = [sys.executable, "-m", "services.broker", "--config", str(config)]
        with subprocess.Popen(command) as process:  # noqa: S603 - this project's own module
            try:
                measurement = asyncio.run(
                    measure(
                        deployment,
                        process.pid,
                        cycles=arguments.cycles,
                        size_bytes=arguments.bytes,
                    )
                )
            finally:
                process.terminate()
    print(json.dumps(report(measurement, cycles=arguments.cycles, size_bytes=arguments.bytes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
