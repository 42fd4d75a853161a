"""Co-run rates: decode in one process beside prefix, training and vision passes in another.

`python -m bench.corun --shape 3b --device cuda --json corun.json` starts NVIDIA's MPS, a process
that decodes without a pause, and runs each kind of background pass on each share of the SMs beside
it. `--shape tiny --device cpu` rehearses it, without shares. For every number of rows, kind and
share it prints the decode rate `d` and the background rate `p`, each over its rate alone on the
whole GPU; `gain` = d + p; what a second of background work saves, (d + p - 1) / p; what a
second of decode saves, (d + p - 1) / d; and the GPU's mean clock and power meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import subprocess
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.decode import Batch, fused_decoder, plain_step
from bench.gpu_clock import GpuClock
from bench.passes import Passes
from bench.shapes import random_model, workload
from bench.timing import Report, facts
from common.gpu.mps import Mps, find_daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.vlm.prefix import PrefixKV

SHARES = (40, 56, 72, 88, 96, 112, 132)
"""SMs; the last one is the whole of an H200."""
ROWS = {"64": (8, 8), "32": (8, 4), "16": (4, 4), "8": (4, 2), "2": (2, 1)}
"""Groups and samples by name."""
_CHUNK = 4
"""Decode steps between two looks at the clock."""
_START_S = 300.0
_PERCENT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@dataclasses.dataclass(slots=True)
class Decoding:
    """The other process, as seen from here."""

    process: Any
    orders: Any
    steps: Any

    def switch(self, rows: str, *, beside: bool) -> None:
        """Decode so many rows from now on, with kernels cut for the whole GPU or for a part."""
        self.orders.send((rows, beside))
        assert self.orders.poll(_START_S), "the decoding process does not answer"
        self.orders.recv()

    def rate(self, run: Callable[[], Any], seconds: float) -> tuple[float, float]:
        """Decode steps a second, and runs a second, while `run` is called again and again.

        It takes longer than `seconds` if nothing was decoded in them.
        """
        begin, before, runs = time.perf_counter(), self.steps.value, 0
        while (passed_s := time.perf_counter() - begin) < seconds or self.steps.value == before:
            assert self.process.is_alive(), "the decoding process has ended"
            run()
            runs += 1
        return (self.steps.value - before) / passed_s, runs / passed_s


def decode_for_ever(shape: str, device_name: str, orders: Any, steps: Any) -> None:
    """The other process: decode what it is told to; count the steps."""
    device = torch.device(device_name)
    load = workload(shape)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made = random_model(load.config, device=device, dtype=dtype, train_vision=False)
    stepping: dict[str, Callable[[bool], Any]] = {}
    step: Callable[[], Any] | None = None
    with torch.no_grad():
        while True:
            if step is None or orders.poll():
                order = orders.recv()
                if order is None:
                    return
                rows, beside = order
                if rows not in stepping:
                    stepping[rows] = _step(made, load.prefix_tokens, device, rows)
                step = partial(stepping[rows], beside)
                step()
                orders.send("decoding")
            step()
            steps.value += _CHUNK


def _step(made: Any, prefix_tokens: int, device: torch.device, rows: str) -> Callable[[bool], Any]:
    groups, samples = ROWS[rows]
    batch = Batch(
        groups=groups, samples=samples, prefix_tokens=prefix_tokens, private_tokens=256, room=512
    )
    if device.type != "cuda":
        plain = plain_step(made, batch, device)
        return lambda beside: plain()
    decoder = fused_decoder(made, batch, device, None)
    decoder.set_rows([(g, s) for g in range(groups) for s in range(samples)], bucket=batch.rows)
    for beside in (False, True):
        decoder.capture(batch.rows, beside=beside)

    def run(beside: bool) -> None:
        decoder.lanes.tokens.fill_(batch.private_tokens)
        decoder.lanes.finished.zero_()
        for _ in range(_CHUNK):
            decoder.step(batch.rows, beside=beside)
        torch.cuda.synchronize()

    return run


def passes_by_kind(passes: Passes, device: torch.device) -> dict[str, Callable[[], Any]]:
    """One pass of each kind, to the end of its kernels."""
    from common.vlm.kernels import split_model

    model = split_model(passes.made.model, "auto")

    def finished(run: Callable[[], Any]) -> Callable[[], Any]:
        def whole() -> None:
            run()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

        return whole

    def without_graph() -> None:
        with torch.no_grad():
            model.prefix_kv(passes.prompt, passes.no_vision)

    def prefix_both() -> None:
        prefix: PrefixKV = model.prefix_kv(passes.prompt, passes.no_vision)
        ends = zip(prefix.keys, prefix.values, strict=True)
        loss = sum(k.float().sum() + v.float().sum() for k, v in ends)
        assert isinstance(loss, torch.Tensor)
        loss.backward()

    return {"prefix": finished(without_graph), "prefix+backward": finished(prefix_both)}


@contextmanager
def mps(device: torch.device) -> Iterator[None]:
    """A daemon of our own, whose client this process and its children are."""
    if device.type != "cuda":
        yield
        return
    with tempfile.TemporaryDirectory(prefix="rollplex-mps-") as folder:
        daemon = Mps(folder=Path(folder))
        daemon.make_folders()
        os.environ.update(daemon.environment)
        process = subprocess.Popen([find_daemon(), "-f"])  # noqa: S603 - the driver's own program
        try:
            while not daemon.running():
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def decoding(shape: str, device: torch.device, percent: int) -> Iterator[Decoding]:
    """Start the other process, and end it.

    Args: percent: of the SMs that MPS lets it have.
    """
    if device.type == "cuda":
        os.environ[_PERCENT] = str(percent)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    steps = spawn.Value("q", 0, lock=False)
    process = spawn.Process(
        target=decode_for_ever, args=(shape, str(device), there, steps), daemon=True
    )
    process.start()
    os.environ.pop(_PERCENT, None)
    try:
        yield Decoding(process, here, steps)
    finally:
        process.kill()
        process.join()


def measure_all(
    other: Decoding,
    kinds: dict[str, Callable[[], Any]],
    report: Report,
    device: torch.device,
    seconds: float,
) -> None:
    """Every number of rows, kind and share."""
    streams = None
    if device.type == "cuda":
        from common.gpu.green_streams import GreenStreams

        streams = GreenStreams(device.index or 0, SHARES)
    shares = streams.shares if streams is not None else (0,)

    def on_share(run: Callable[[], Any], share: int) -> Callable[[], Any]:
        if streams is None:
            return run

        def limited() -> None:
            with torch.cuda.stream(streams.stream(share)):
                run()

        return limited

    alone: dict[tuple[str, int], float] = {}
    for kind, run in kinds.items():
        clocks: dict[str, float] = {}
        for share in shares:
            job = on_share(run, share)
            job()
            with GpuClock(device) as clock:
                alone[kind, share] = _runs_a_second(job, seconds)
            clocks |= {f"{name} {share}": value for name, value in clock.figures().items()}
        whole = alone[kind, shares[-1]]
        found = {str(share): alone[kind, share] / whole for share in shares}
        report.case(f"alone {kind}", lambda f=found, w=whole, c=clocks: {"ms": 1e3 / w, **f, **c})
    for rows in ROWS:
        other.switch(rows, beside=False)
        with GpuClock(device) as clock:
            steps_alone, _ = other.rate(lambda: time.sleep(0.05), seconds)
        report.case(
            f"{rows} rows alone", lambda s=steps_alone, c=clock: {"ms": 1e3 / s, **c.figures()}
        )
        other.switch(rows, beside=True)
        for kind, run in kinds.items():
            whole = alone[kind, shares[-1]]
            for share in shares:
                job = on_share(run, share)
                job()
                with GpuClock(device) as clock:
                    steps, runs = other.rate(job, seconds)
                report.case(
                    f"{rows} rows {kind} {share}",
                    lambda d=steps / steps_alone, p=runs / whole, c=clock: {
                        **_figures(d, p),
                        **c.figures(),
                    },
                )


def _figures(d: float, p: float) -> dict[str, float]:
    gain = d + p
    return {
        "d": d,
        "p": p,
        "gain": gain,
        "per_background": (gain - 1) / p,
        "per_decode": (gain - 1) / max(d, 1e-9),
    }


def _runs_a_second(run: Callable[[], Any], seconds: float) -> float:
    begin, runs = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - begin) < seconds:
        run()
        runs += 1
    return runs / passed_s


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shape", choices=("3b", "tiny"), default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument(
        "--decode-percent", type=int, default=100, help="of the SMs that the decode may use"
    )
    parser.add_argument("--alone", action="store_true", help="no passes beside the decode")
    options = parser.parse_args()
    device = torch.device(options.device)
    report = Report(only=(), path=options.json)
    with mps(device), decoding(options.shape, device, options.decode_percent) as other:
        report.facts = facts(device)
        load = workload(options.shape)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        made = random_model(load.config, device=device, dtype=dtype, train_vision=False)
        passes = Passes(load, made, report, device, 3)
        kinds = {} if options.alone else passes_by_kind(passes, device)
        measure_all(other, kinds, report, device, options.seconds)
    print(f"\n{report.facts}\n{report.table()}")


if __name__ == "__main__":
    main()
