"""The asynchronous client of a controller."""

from __future__ import annotations

import asyncio
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from common.config.deployment import load_deployment
from common.config.recipe import Recipe
from common.errors import DeadlineExceeded, FailedPrecondition, Stale, Unavailable
from common.transport import open_channel
from protos.rollplex.v1 import broker_pb2, broker_pb2_grpc, control_pb2_grpc
from protos.rollplex.v1 import control_pb2 as pb
from rollplex.conversion import cluster_from_proto, run_from_proto, update_from_proto
from rollplex.ledger import ledger_from_proto
from rollplex.models import Checkpoint, Cluster, Run, RunUpdate
from rollplex.recipes import absolute_paths, load_recipe
from rollplex.weights import read_weights

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from rollplex.ledger import Ledger
    from rollplex.weights import WeightsReport

_CALL = timedelta(seconds=30)
_CREATE = timedelta(minutes=5)
_CHECKPOINT = timedelta(minutes=30)
_CHECKSUMS = timedelta(minutes=10)
_STALE_TRIES = 5
"""How often weights are asked for that an update has overtaken."""
_RECONNECT_PAUSE_S = 0.5
_BROKER = "broker/0"


class Client:
    """Calls one controller.

    Every method raises a `RollplexError`: `InvalidArgument` for wrong input, `NotFound` for an
    unknown run, `FailedPrecondition` where the run's state does not allow it, `Unavailable` where
    the controller is away, `DeadlineExceeded` where it does not answer. Errors of gRPC never leave.
    """

    def __init__(self, address: str) -> None:
        """Use `Client.connect`, which also looks whether the controller is there."""
        self.address = address
        self._channel = open_channel(address, deadline_s=_CALL.total_seconds())
        self._stub = control_pb2_grpc.ControlStub(self._channel)
        self._broker_channel: Any = None

    @classmethod
    async def connect(
        cls, address: str | None = None, *, deadline: timedelta = timedelta(seconds=10)
    ) -> Client:
        """Connect to a controller.

        Args:
            address: `host:port`; None: that of the deployment that the environment names.
            deadline: how long the controller may take to answer for the first time.

        Raises:
            Unavailable: no controller answers there.
        """
        client = cls(address or load_deployment().controller_address)
        try:
            await client._stub.ListRuns(pb.ListRunsRequest(), timeout=deadline.total_seconds())
        except (Unavailable, DeadlineExceeded) as error:
            await client.close()
            raise Unavailable(f"no controller answers at {client.address}: {error}") from error
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._forget_broker()
        await self._channel.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def create_run(
        self,
        recipe: Recipe | Path,
        *,
        sets: Sequence[str] = (),
        run_dir: Path | None = None,
        resume_from: Path | None = None,
        request_id: str | None = None,
        deadline: timedelta = _CREATE,
    ) -> Run:
        """Check a recipe, here and on the controller, and queue it as a run.

        Args:
            recipe: a recipe, or the file that holds one.
            sets: `table.key=value` items that override the file.
            run_dir: folder of the run on the controller's machine; None: the controller chooses.
            resume_from: checkpoint folder to continue from.
            request_id: repeated calls with the same id give the same run; None: a new id, under
                which this call is repeated should the controller go away while it answers.

        Raises:
            InvalidArgument: the recipe, the data, a reward or a folder is not usable.
            ResourceExhausted: the memory broker cannot hold the run; names who holds what.
        """
        loaded = (
            absolute_paths(recipe) if isinstance(recipe, Recipe) else load_recipe(recipe, sets=sets)
        )
        request = pb.CreateRunRequest(
            recipe_json=loaded.model_dump_json(),
            run_dir=_absolute(run_dir),
            resume_from=_absolute(resume_from),
            request_id=request_id or uuid.uuid4().hex,
        )
        give_up_s = time.monotonic() + deadline.total_seconds()
        while True:
            left_s = give_up_s - time.monotonic()
            try:
                return run_from_proto(await self._stub.CreateRun(request, timeout=left_s))
            except Unavailable:
                if time.monotonic() + _RECONNECT_PAUSE_S > give_up_s:
                    raise
                await asyncio.sleep(_RECONNECT_PAUSE_S)

    async def get_run(self, run_id: str) -> Run:
        """The run as it is now."""
        return run_from_proto(await self._stub.GetRun(pb.GetRunRequest(run_id=run_id)))

    async def list_runs(self) -> list[Run]:
        """All runs, oldest first."""
        reply = await self._stub.ListRuns(pb.ListRunsRequest())
        return [run_from_proto(run) for run in reply.runs]

    async def run_at_work(self) -> Run:
        """The one run that services have: it is configured, makes steps, or is paused.

        Raises: FailedPrecondition if there is none.
        """
        for run in await self.list_runs():
            if run.state.at_work:
                return run
        raise FailedPrecondition("no run is at work; `rollplex run` starts one")

    async def watch_run(
        self, run_id: str, *, patience: timedelta = timedelta(seconds=60)
    ) -> AsyncIterator[RunUpdate]:
        """The latest state at once, then each change; ends with the run.

        A reader that is slower than the run gets the latest state, not every one.

        Args:
            patience: how long the controller may be away, as while it restarts.

        Raises:
            Unavailable: it was away for longer.
        """
        heard_s = time.monotonic()
        while True:
            try:
                async for message in self._stub.WatchRun(pb.WatchRunRequest(run_id=run_id)):
                    heard_s = time.monotonic()
                    yield update_from_proto(message)
            except Unavailable:
                if time.monotonic() - heard_s > patience.total_seconds():
                    raise
                await asyncio.sleep(_RECONNECT_PAUSE_S)
            else:
                return

    async def wait_run(self, run_id: str, *, patience: timedelta = timedelta(seconds=60)) -> Run:
        """Wait until the run has ended."""
        run: Run | None = None
        async for update in self.watch_run(run_id, patience=patience):
            run = update.run
        if run is None:
            raise Unavailable(f"the controller at {self.address} said nothing about run {run_id}")
        return run

    async def pause(self, run_id: str) -> Run:
        """Have the run wait after its running step."""
        return run_from_proto(await self._stub.PauseRun(pb.PauseRunRequest(run_id=run_id)))

    async def resume(self, run_id: str) -> Run:
        """Have a paused run go on."""
        return run_from_proto(await self._stub.ResumeRun(pb.ResumeRunRequest(run_id=run_id)))

    async def stop(self, run_id: str, *, after_step: bool = False) -> Run:
        """End the run: now, without the running step's update, or when that step is committed."""
        request = pb.StopRunRequest(run_id=run_id, after_step=after_step)
        return run_from_proto(await self._stub.StopRun(request))

    async def save_checkpoint(
        self, run_id: str, *, deadline: timedelta = _CHECKPOINT
    ) -> Checkpoint:
        """Have a checkpoint written between two steps; returns when it is committed."""
        request = pb.SaveRunCheckpointRequest(run_id=run_id)
        saved = await self._stub.SaveCheckpoint(request, timeout=deadline.total_seconds())
        return Checkpoint(path=saved.path, weights_version=saved.weights_version)

    async def cluster(self) -> Cluster:
        """Which processes are registered, and what they do."""
        return cluster_from_proto(await self._stub.GetCluster(pb.GetClusterRequest()))

    async def ledger(self) -> Ledger:
        """The memory of the node: who holds how many bytes until when.

        The memory broker itself is asked, at the address that it is registered with.

        Raises:
            Unavailable: no broker is registered, or it does not answer.
        """
        if self._broker_channel is None:
            address = await self._broker_address()
            self._broker_channel = open_channel(address, deadline_s=_CALL.total_seconds())
        stub = broker_pb2_grpc.BrokerStub(self._broker_channel)
        try:
            return ledger_from_proto(await stub.GetLedger(broker_pb2.GetLedgerRequest()))
        except Unavailable:
            # The next one may be at another address.
            await self._forget_broker()
            raise

    async def verify_weights(
        self, run_id: str | None = None, *, deadline: timedelta = _CHECKSUMS
    ) -> WeightsReport:
        """Have every process checksum the weights that it reads, all at one version.

        The workers themselves are asked. Steps go on meanwhile, but an update waits until the
        weights are read.

        Args:
            run_id: None: the run that is at work.
            deadline: how long a process may take.

        Raises:
            FailedPrecondition: no run is at work, or a process is not configured for it.
            Stale: updates came faster than the processes could be asked.
            Unavailable: a process is away.
        """
        tries = _STALE_TRIES
        while True:
            run = await self.run_at_work() if run_id is None else await self.get_run(run_id)
            try:
                return await read_weights(
                    await self.cluster(),
                    run.run_id,
                    run.steps_done,
                    deadline_s=deadline.total_seconds(),
                )
            except Stale:
                tries -= 1
                if not tries:
                    raise

    async def _broker_address(self) -> str:
        cluster = await self.cluster()
        for entry in cluster.services:
            if entry.participant == _BROKER:
                return entry.grpc_address
        raise Unavailable(f"no {_BROKER} is registered with the controller at {self.address}")

    async def _forget_broker(self) -> None:
        channel, self._broker_channel = self._broker_channel, None
        if channel is not None:
            await channel.close()


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.expanduser().absolute())
