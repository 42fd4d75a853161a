"""What has to hold before anything is started. All that does not is reported at once."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from common.config.base import ConfigError
from common.errors import FailedPrecondition, RollplexError
from common.registry.connection import redacted
from common.registry.embedded import find_server, wait_ready

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.config.deployment import Deployment

_REDIS_ANSWER_S = 3.0
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_GIB = 2**30


class PrecheckFailed(FailedPrecondition):
    """The node cannot run this deployment; each problem names its key, value and remedy."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("nothing was started:\n" + "\n".join(f"  {line}" for line in problems))
        self.problems = problems


def check(deployment: Deployment, *, package: str) -> None:
    """Raises PrecheckFailed with everything that is wrong."""
    problems = [
        *_folder_problems(deployment),
        *_module_problems(deployment, package),
        *_port_problems(deployment),
        *memory_problems(deployment, available_bytes()),
        *_redis_problems(deployment),
        *_engine_problems(deployment),
    ]
    if problems:
        raise PrecheckFailed(problems)


def available_bytes() -> int:
    """Memory that this process and its children may still take: machine and control group."""
    lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except OSError:
        # No control group of our own, or version 1: the machine's figure holds.
        return available
    return available if limit == "max" else min(available, int(limit) - used)


def memory_problems(deployment: Deployment, available: int) -> Iterator[str]:
    """Whether the arena fits into `available` bytes."""
    if deployment.arena_bytes > available:
        yield (
            f"arena_gib = {deployment.arena_gib:g}: {available / _GIB:.1f} GiB of memory are "
            f"available; set arena_gib below that (the model's activations need room too)"
        )


def _folder_problems(deployment: Deployment) -> Iterator[str]:
    try:
        deployment.make_dirs()
        with tempfile.TemporaryFile(dir=deployment.state_dir):
            pass
    except (ConfigError, OSError) as error:
        yield f"state_dir = {str(deployment.state_dir)!r}: {error}"


def _module_problems(deployment: Deployment, package: str) -> Iterator[str]:
    for service in {participant.service: None for participant in deployment.participants}:
        module = f"{package}.{service.value.replace('-', '_')}.__main__"
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            yield f"the program of {service}, {module}, cannot be found; is the package installed?"


def _engine_problems(deployment: Deployment) -> Iterator[str]:
    python = deployment.engine_python
    if python is not None and not os.access(python, os.X_OK):
        yield (
            f"engine_python = {str(python)!r} is no program that can be run; name the interpreter "
            "of an environment that has SGLang, or leave it unset"
        )


def _port_problems(deployment: Deployment) -> Iterator[str]:
    wanted: list[tuple[str, str]] = []
    for participant in deployment.participants:
        name = participant.service.value
        wanted += [
            (f"services.{name}.grpc_port", deployment.grpc_address(participant)),
            (f"services.{name}.http_port", deployment.http_address(participant)),
        ]
    if deployment.redis.url is None and deployment.redis.port is not None:
        wanted.append(("redis.port", f"127.0.0.1:{deployment.redis.port}"))
    seen: dict[str, str] = {}
    for key, address in wanted:
        host, _, port = address.rpartition(":")
        if port == "0":
            continue
        if address in seen:
            yield f"{key} = {port}: is the port of {seen[address]} too; choose another"
            continue
        seen[address] = key
        try:
            socket.create_server((host, int(port))).close()
        except OSError as error:
            yield (
                f"{key} = {port}: {host} cannot listen on it ({error.strerror}"
                f"{_holder(int(port))}); free it, choose another, or 0 for any"
            )


def _holder(port: int) -> str:
    """Who listens on the port, as far as this user may know."""
    for process in psutil.process_iter(["pid", "uids", "cmdline"]):
        uids = process.info["uids"]
        if uids is None or uids.real != os.getuid():
            continue
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
            return f", held by pid {process.pid}: {' '.join(process.info['cmdline'] or ())[:120]}"
    return ""


def _redis_problems(deployment: Deployment) -> Iterator[str]:
    url = deployment.redis.url
    try:
        if url is None:
            find_server()
        else:
            asyncio.run(wait_ready(url, timeout_s=_REDIS_ANSWER_S))
    except RollplexError as error:
        shown = repr(redacted(url)) if url is not None else "unset"
        yield f"redis.url = {shown}: {error}"
