"""What a machine has and lacks for Rollplex. Starts nothing, changes nothing, needs no torch."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from common.config.deployment import Deployment, load_deployment
from common.errors import RollplexError
from common.ids import WORKERS
from common.registry.embedded import find_server

if TYPE_CHECKING:
    from collections.abc import Callable

Verdict = Literal["ok", "note", "lacks"]

_PACKAGES = ("torch", "transformers", "safetensors", "grpcio", "protobuf", "pyzmq", "redis")
_MPS_PIPES = Path("/tmp/nvidia-mps")  # noqa: S108 - the control daemon's own default
_GIB = 2**30
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_COMMAND_LIMIT_S = 10
_CONNECT_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        verdict: `ok`; `note`: works, but worth knowing; `lacks`: Rollplex will not run.
        mend: what to do about it; empty: nothing.
    """

    LACKS: ClassVar[Verdict] = "lacks"

    subject: str
    verdict: Verdict
    found: str
    mend: str = ""


def examine() -> list[Finding]:
    """Look at everything. Never raises for what it finds."""
    findings = [_python(), *_packages(), *_gpus(), _memfd(), _cores()]
    try:
        deployment = load_deployment()
    except RollplexError as error:
        return [*findings, Finding(subject="deployment", verdict="lacks", found=str(error))]
    looks: list[Callable[[Deployment], Finding]] = [_threads, _memory, _state_dir, _redis, _ports]
    return [*findings, *(look(deployment) for look in looks)]


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        mend = "Rollplex needs Linux: memfd, SO_PEERCRED, Unix sequenced-packet sockets"
        return Finding(subject="python", verdict="lacks", found=found, mend=mend)
    return Finding(subject="python", verdict="ok", found=found)


def _packages() -> list[Finding]:
    findings = []
    for name in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            findings.append(
                Finding(
                    subject=name,
                    verdict="lacks",
                    found="not installed",
                    mend="pip install rollplex, into the environment of this command",
                )
            )
        else:
            findings.append(Finding(subject=name, verdict="ok", found=version))
    return findings


def _gpus() -> list[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        found = "none (no nvidia-smi on PATH)"
        mend = 'device = "cpu" in the deployment runs everything on the CPU'
        return [Finding(subject="GPU", verdict="note", found=found, mend=mend)]
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(  # noqa: S603 - found on PATH, fixed arguments
            query, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return [Finding(subject="GPU", verdict="note", found=f"nvidia-smi failed: {error}")]
    gpus = [
        Finding(subject="GPU", verdict="ok", found=line.strip())
        for line in listed.splitlines()
        if line.strip()
    ]
    return [*gpus, _mps()]


def _mps() -> Finding:
    if shutil.which("nvidia-cuda-mps-control") is None:
        return Finding(
            subject="MPS",
            verdict="note",
            found="no nvidia-cuda-mps-control on PATH",
            mend="without it the services share a GPU by time slices only",
        )
    if not _MPS_PIPES.exists():
        return Finding(
            subject="MPS",
            verdict="note",
            found="installed, not running",
            mend="start it with `nvidia-cuda-mps-control -d`",
        )
    return Finding(subject="MPS", verdict="ok", found=f"running, pipes in {_MPS_PIPES}")


def _memfd() -> Finding:
    try:
        fd = os.memfd_create("rollplex:doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        finally:
            os.close(fd)
    except OSError as error:
        mend = "the kernel or the container's seccomp profile forbids memfd_create with seals"
        return Finding(subject="memfd", verdict="lacks", found=str(error), mend=mend)
    return Finding(subject="memfd", verdict="ok", found="can be made and sealed")


def _cores() -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    found = f"{usable} usable of {present}"
    return Finding(subject="cores", verdict="ok", found=found)


def _threads(deployment: Deployment) -> Finding:
    workers = sum(deployment.ranks(service) for service in WORKERS)
    wanted, usable = workers * deployment.worker_threads, len(os.sched_getaffinity(0))
    found = f"{deployment.worker_threads} for each of {workers} workers"
    if wanted > usable:
        mend = f"more than the {usable} usable cores: they will take turns"
        return Finding(subject="threads", verdict="note", found=found, mend=mend)
    return Finding(subject="threads", verdict="ok", found=found)


def _memory(deployment: Deployment) -> Finding:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        lines = dict(line.split(":", 1) for line in text.splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError) as error:
        return Finding(subject="memory", verdict="note", found=f"cannot be told: {error}")
    found = f"{available / _GIB:.1f} GiB free, arena {deployment.arena_gib:g} GiB"
    if deployment.device == "cpu" and available < deployment.arena_bytes:
        mend = "set a smaller arena_gib in the deployment, or free memory"
        return Finding(subject="memory", verdict="lacks", found=found, mend=mend)
    return Finding(subject="memory", verdict="ok", found=found)


def _state_dir(deployment: Deployment) -> Finding:
    folder = deployment.state_dir
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        mend = "set state_dir in the deployment, or ROLLPLEX_STATE_DIR, to a folder of yours"
        return Finding(
            subject="state_dir", verdict="lacks", found=f"{parent} is not writable", mend=mend
        )
    free = shutil.disk_usage(parent).free
    found = f"{folder}, {free / _GIB:.1f} GiB free"
    return Finding(subject="state_dir", verdict="ok", found=found)


def _redis(deployment: Deployment) -> Finding:
    if deployment.redis.url is not None:
        found = "a server of its own is configured by redis.url"
        return Finding(subject="Redis", verdict="ok", found=found)
    try:
        return Finding(subject="Redis", verdict="ok", found=f"will run {find_server()}")
    except RollplexError as error:
        return Finding(subject="Redis", verdict="lacks", found=str(error))


def _ports(deployment: Deployment) -> Finding:
    taken = []
    for participant in deployment.participants:
        for address in (deployment.grpc_address(participant), deployment.http_address(participant)):
            host, _, port = address.rpartition(":")
            if port != "0" and _answers(host, int(port)):
                taken.append(f"{address} ({participant})")
    if taken:
        return Finding(
            subject="ports",
            verdict="note",
            found=f"in use: {', '.join(taken)}",
            mend="fine if this node is up; else set grpc_port_base and http_port_base",
        )
    return Finding(subject="ports", verdict="ok", found="all free")


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_LIMIT_S):
            return True
    except OSError:
        return False
