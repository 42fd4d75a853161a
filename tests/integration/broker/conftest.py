"""A real broker process, and real processes as its participants."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from common.config.deployment import Deployment
from common.ids import Epoch, Incarnation, Participant, RunId, Service
from common.tensors.client import BrokerClient
from common.transport import open_channel
from protos.rollplex.v1 import broker_pb2 as pb
from protos.rollplex.v1.broker_pb2_grpc import BrokerStub
from tests.unit.broker.driver import plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

REPOSITORY = Path(__file__).parents[3]
START_S = 30.0
SETTLE_S = 20.0
ARENA_BYTES = 1 << 26
LEARNER = Participant(service=Service.LEARNER)
ENCODER = Participant(service=Service.PREFIX_ENCODER)
ROLLOUT = Participant(service=Service.ROLLOUT)


@dataclass
class Started:
    """A broker's process and where it is."""

    process: subprocess.Popen[bytes]
    deployment: Deployment
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "broker.log").read_text()


@dataclass
class Broker:
    """A broker, its control plane, and how to join it."""

    started: Started
    stub: Any
    clients: list[BrokerClient]

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.started.process

    @property
    def deployment(self) -> Deployment:
        return self.started.deployment

    async def join(self, participant: Participant) -> BrokerClient:
        client = await BrokerClient.connect(
            self.deployment.broker_socket, participant, Incarnation("test"), timeout_s=START_S
        )
        self.clients.append(client)
        return client

    async def begin(self, epoch: int, run: str = "run") -> pb.BeginStepReply:
        request = pb.BeginStepRequest(plan=plan(epoch, run_id=RunId(run)).to_proto())
        return await self.stub.BeginStep(request)

    async def ledger(self) -> pb.Ledger:
        return await self.stub.GetLedger(pb.GetLedgerRequest())

    async def settle(self, used_bytes: int) -> pb.Ledger:
        """Wait until one-way messages have had their effect; all arenas count."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                ledger = await self.ledger()
                if sum(arena.used_bytes for arena in ledger.arenas) == used_bytes:
                    return ledger
                await asyncio.sleep(0.01)

    async def held(self, held_bytes: int) -> pb.Ledger:
        """Wait until this is what processes have told that they hold."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                ledger = await self.ledger()
                if sum(arena.held_bytes for arena in ledger.arenas) == held_bytes:
                    return ledger
                await asyncio.sleep(0.01)

    @property
    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_broker(folder: Path, **settings: Any) -> Started:
    """Start a broker's process; `settings` are further keys of the deployment."""
    values: dict[str, Any] = {
        "state_dir": str(folder),
        "http_port_base": 0,
        "arena_gib": ARENA_BYTES / 2**30,
        "services": {"broker": {"grpc_port": free_port()}},
        "redis": {"url": f"unix://{folder}/no-redis.sock"},
        **settings,
    }
    config = folder / "deployment.json"
    config.write_text(json.dumps(values))
    log = (folder / "broker.log").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "services.broker", "--config", str(config)],
        cwd=REPOSITORY,
        stderr=log,
    )
    log.close()
    return Started(process, Deployment.model_validate(values), folder)


def stop(process: subprocess.Popen[bytes]) -> int:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(20)
    finally:
        process.kill()


@asynccontextmanager
async def connected(started: Started) -> AsyncIterator[Broker]:
    """A fresh run in its first epoch, and the learner."""
    address = started.deployment.grpc_address(Participant(service=Service.BROKER))
    channel = open_channel(address, deadline_s=START_S)
    broker = Broker(started, BrokerStub(channel), [])
    try:
        await broker.join(LEARNER)
        request = pb.OpenRunRequest(run_id="run", epoch=Epoch(0))
        await broker.stub.OpenRun(request, wait_for_ready=True)
        await broker.begin(1)
        yield broker
    finally:
        for client in broker.clients:
            await client.close()
        if started.process.poll() is None:
            await broker.stub.CloseRun(pb.CloseRunRequest(run_id="run"))
            await broker.settle(0)
        await channel.close()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """One process for the tests of a module."""
    started = start_broker(tmp_path_factory.mktemp("broker"))
    yield started
    assert stop(started.process) == 0, started.log
    assert not started.deployment.broker_socket.exists()


@pytest_asyncio.fixture
async def broker(started: Started) -> AsyncIterator[Broker]:
    """A fresh run on the module's broker."""
    async with connected(started) as broker:
        yield broker


@pytest_asyncio.fixture
async def mortal_broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """A broker of the test's own, which it may kill."""
    started = start_broker(tmp_path)
    try:
        async with connected(started) as broker:
            yield broker
    finally:
        stop(started.process)
