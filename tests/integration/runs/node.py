"""A real node: every service under the supervisor, on free ports, and ways to look into it."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
import tempfile
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from common.config.deployment import Deployment, ServicePlacement
from common.errors import Unavailable
from common.ids import Participant, Service
from common.registry.runs import RunLedger
from common.transport import open_channel
from deploy.local.node import up
from deploy.local.programs import SERVICES_PACKAGE
from deploy.local.supervisor import Supervisor
from protos.rollplex.v1 import broker_pb2_grpc
from protos.rollplex.v1.broker_pb2 import GetLedgerRequest, LedgerEntry
from rollplex.client import Client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import pytest

BrokerStub = Any
REPOSITORY = Path(__file__).parents[3]
CALL_S = 5.0
CONNECT_S = 30.0
LOG_LINES = 80
REDIS = "redis"


def free_port() -> int:
    """A port that no connection is given by chance while a killed service is away."""
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(lowest_given // 2, lowest_given)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def deployment(folder: Path, *, name: str, **settings: Any) -> Deployment:
    """One thread a worker, so that results do not depend on the machine's number of cores.

    Args: settings: others than these.
    """
    fixed = (Service.CONTROLLER, Service.BROKER)
    return Deployment(
        name=name,
        state_dir=folder,
        grpc_port_base=0,
        http_port_base=0,
        services={service: ServicePlacement(grpc_port=free_port()) for service in fixed},
        threads_per_worker=1,
        **{"arena_gib": 0.5, **settings},
    )


class Node:
    """Started by `start`; everything else looks at it from outside, or kills."""

    def __init__(
        self, deployment: Deployment, folder: Path, *, package: str = SERVICES_PACKAGE
    ) -> None:
        self.deployment = deployment
        self._package = package
        self.folder = folder
        self._supervisor = Supervisor(deployment)
        self._pids: dict[str, int] = {}

    def start(self) -> None:
        up(self.deployment, package=self._package, folder=REPOSITORY)

    def stop(self) -> None:
        self._supervisor.stop()

    def log(self, name: str) -> str:
        """What a program has logged, such as `learner-0`."""
        path = self.deployment.log_dir / f"{name.replace('/', '-')}.log"
        return path.read_text(errors="replace")

    def complaints(self) -> str:
        """The end of every log, for the report of a failed test."""
        parts = []
        for path in sorted(self.deployment.log_dir.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            parts += [f"\n--- {path.name}", *lines[-LOG_LINES:]]
        return "\n".join(parts)

    def pid(self, name: str) -> int:
        """Pid of `redis` or of a participant, such as `learner/0`; 0: it does not run."""
        wanted = name.replace("/", "-")
        return next(s.pid for s in self._supervisor.states() if s.name == wanted)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A client; a controller that a test has killed is waited for."""
        give_up_s = time.monotonic() + CONNECT_S
        while True:
            try:
                client = await Client.connect(self.deployment.controller_address)
            except Unavailable:
                if time.monotonic() > give_up_s:
                    raise
                await asyncio.sleep(0.1)
            else:
                break
        async with client:
            yield client

    @asynccontextmanager
    async def broker(self) -> AsyncIterator[BrokerStub]:
        address = self.deployment.grpc_address(Participant(service=Service.BROKER))
        channel = open_channel(address, deadline_s=CALL_S)
        try:
            yield broker_pb2_grpc.BrokerStub(channel)
        finally:
            await channel.close()

    @asynccontextmanager
    async def ledger(self) -> AsyncIterator[RunLedger]:
        ledger = RunLedger.of(self.deployment)
        try:
            yield ledger
        finally:
            await ledger.close()

    async def entries(self, stub: BrokerStub, run_id: str | None = None) -> list[LedgerEntry]:
        """The broker's ledger, of one run or of all; empty while the broker is away."""
        try:
            return list((await stub.GetLedger(GetLedgerRequest(run_id=run_id))).entries)
        except Unavailable:
            return []


def children(pid: int) -> set[int]:
    """Pids of all processes below one."""
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


async def gone(pids: set[int], *, within_s: float) -> set[int]:
    """Wait for processes to end. Returns: those that did not."""
    left = set(pids)
    give_up_s = asyncio.get_running_loop().time() + within_s
    while left := {pid for pid in left if _runs(pid)}:
        if asyncio.get_running_loop().time() > give_up_s:
            break
        await asyncio.sleep(0.05)
    return left


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(pid: int, number: int) -> None:
    os.kill(pid, number)


@contextmanager
def running(
    request: pytest.FixtureRequest,
    *,
    name: str = "runs",
    package: str = SERVICES_PACKAGE,
    **settings: Any,
) -> Iterator[Node]:
    """A node in a folder of its own; its logs are printed if a test fails meanwhile.

    Args: name, settings: of the deployment. package: of the services' programs.
    """
    failed_before = request.session.testsfailed
    # Not pytest's folder: its long names make a Unix socket's path too long.
    with tempfile.TemporaryDirectory(prefix=f"rollplex-{name}-") as path:
        folder = Path(path)
        node = Node(deployment(folder / "node", name=name, **settings), folder, package=package)
        try:
            node.start()
            yield node
        finally:
            node.stop()
            if request.session.testsfailed > failed_before:
                sys.stdout.write(node.complaints())
