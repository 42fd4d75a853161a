"""What a worker holds for one epoch of one step, and how it gives all of it back.

Invariants:
- Everything taken through a scope (leases, storage holds) is given back by `close`, whatever ended
  the epoch.
- `close` runs behind the compute job that is running, if any, so nothing is unmapped, and no
  accumulator let go, under a kernel.
- After `close`, what a late answer of the broker still brings is given back at once, and nothing
  is published any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from common.errors import RollplexError
from common.events import Event, WorkSpan
from common.tensors.spec import DType, Placement, TensorSpec
from common.tensors.views import tensor_view
from common.worker.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
    from concurrent.futures import Executor

    from common.events.bodies import Body
    from common.ids import GroupId, LeaseId, Participant, WeightsVersion
    from common.step.tasks import Task
    from common.step.view import StepView
    from common.tensors.client import BrokerClient
    from common.tensors.lease import Lease
    from common.tensors.storage import Hold, Storage
    from common.worker.device import WorkerDevice
    from common.worker.governor import Governor
    from common.worker.own_memory import OwnMemory
    from common.worker.work import Held, HeldWeights

INLINE_COPY_BYTES = 1 << 20
"""Larger copies into leases leave the event loop's thread."""
HOLD_TIMEOUT_S = 300.0
"""Longest wait for a storage hold; the step's own deadline is usually shorter."""

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, None]]
TensorShape = tuple[torch.dtype, tuple[int, ...]]


class StepOver(RollplexError):
    """The epoch ended while this task still ran; its result is not wanted."""


class Releasable(Protocol):
    """Something held until `release`, which may be called from any thread, and twice."""

    def release(self) -> None:
        """Give it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Generic[T]):
    """What a compute job returned, and when it ran."""

    value: T
    span: WorkSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A lease that is being filled."""

    lease_id: LeaseId
    tensors: Mapping[str, torch.Tensor]


class Rewriting:
    """A WRITE hold of an epoch: until `touch`, letting go leaves the old version whole."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._touched = False

    def touch(self) -> None:
        """The contents are about to change. Any thread."""
        self._touched = True

    async def publish(self) -> None:
        """Make what was written readable as the hold's version."""
        await self._hold.publish()

    def release(self) -> None:
        """Let go; unpublished changes leave the storage torn."""
        self._hold.release(untouched=not self._touched)


class StepScope:
    """The holdings of one worker in one epoch."""

    def __init__(
        self,
        view: StepView,
        *,
        participant: Participant,
        broker: BrokerClient,
        compute: Executor,
        device: WorkerDevice,
        governor: Governor | None = None,
        own_memory: OwnMemory | None = None,
        publish: Callable[[Event], Awaitable[None]],
        spawn: Callable[[StepScope, Task, Work], None],
    ) -> None:
        self.view = view
        self.plan = view.plan
        self.closed = False
        self._participant = participant
        self._broker = broker
        self._compute = compute
        self._device = device
        self._governor = governor
        self._own_memory = own_memory
        self._publish = publish
        self._spawn = spawn
        self._held: list[Releasable] = []
        self._produced: dict[GroupId, list[Lease]] = {}

    async def run(self, task: Task, job: Callable[[], T], *, work: float = 1.0) -> Timed[T]:
        """Run a job in the compute thread, to the end of its kernels.

        Beside a decode it has a share of the SMs, and runs when no other service has one.

        Args:
            work: size of the job, in a unit of the task's own, such as its tokens.
        Raises: StepOver if the epoch ends before it starts.
        """
        governor = self._governor
        if governor is None or not governor.wants_token:
            await self._keep_to_budget()
            return await self._computed(task, job, work, beside=False)
        async with self.exclusive(governor.token.storage):
            await self._keep_to_budget()
            return await self._computed(task, job, work, beside=True)

    async def _keep_to_budget(self) -> None:
        if self._own_memory is not None:
            await self._own_memory.keep_to_budget()

    async def _computed(
        self, task: Task, job: Callable[[], T], work: float, *, beside: bool
    ) -> Timed[T]:
        governor = self._governor

        def timed() -> Timed[T]:
            self.check()
            if governor is not None and beside:
                governor.watch_alone()
                self.check()
            start_ns, sms, decode_rate = time.monotonic_ns(), 0, 0.0
            if governor is not None:
                governed = governor.run(task, job, work=work, beside=beside)
                value, sms, decode_rate = governed.value, governed.sms, governed.decode_rate
            else:
                value = job()
                self._device.wait()
            end_ns = time.monotonic_ns()
            self._look()
            span = WorkSpan(
                task=task,
                start_ns=start_ns,
                end_ns=end_ns,
                sms=sms,
                decode_rate=decode_rate,
            )
            return Timed(value=value, span=span)

        return await asyncio.get_running_loop().run_in_executor(self._compute, timed)

    async def between_jobs(self, job: Callable[[], T]) -> T:
        """Run something short that computes nothing in the compute thread.

        Raises: StepOver if the epoch ends before it starts.
        """

        def checked() -> T:
            self.check()
            try:
                return job()
            finally:
                self._look()

        return await asyncio.get_running_loop().run_in_executor(self._compute, checked)

    def _look(self) -> None:
        """The process may have more memory of its device now, or less."""
        if self._own_memory is not None:
            self._own_memory.look()

    async def return_memory(self, drop: Callable[[], object]) -> None:
        """Drop what this epoch needs no more, and return its memory to the device.

        Raises: StepOver if the epoch ends before it is done.
        """

        def dropped() -> None:
            drop()
            self._device.give_back()

        await self.between_jobs(dropped)

    def spawn(self, task: Task, work: Work) -> None:
        """Run `work` beside the tasks; an error that it raises ends the epoch."""
        self._spawn(self, task, work)

    def check(self) -> None:
        """Raises StepOver once the epoch has ended."""
        if self.closed:
            raise StepOver(f"epoch {self.plan.epoch} of step {self.plan.step} has ended")

    async def acquire(self, *lease_ids: LeaseId) -> list[Lease]:
        """Hold leases, in the order given; waits until each is sealed."""
        leases = await self._broker.acquire(lease_ids, epoch=self.plan.epoch)
        self.keep(*leases)
        return leases

    @asynccontextmanager
    async def writing(
        self,
        name: str,
        group: GroupId,
        tensors: Mapping[str, TensorShape],
        *,
        consumers: Iterable[Participant],
        next_use: Task,
        placement: Placement,
    ) -> AsyncIterator[Draft]:
        """Allocate a lease, to be filled inside the block; it is sealed at the block's end.

        Args:
            name: tensor class, such as `policy.prefix_kv`.
            tensors: dtype and shape of each tensor by name.
            consumers: who will acquire it, once each.
            placement: in the host's memory or on the device that the workers compute on.
        """
        specs = [
            TensorSpec(name=key, dtype=dtype_name(dtype), shape=shape)
            for key, (dtype, shape) in tensors.items()
        ]
        lease = await self._broker.allocate(
            run_id=self.plan.run_id,
            epoch=self.plan.epoch,
            group=group,
            name=name,
            tensors=specs,
            consumers=list(consumers),
            next_use=next_use,
            placement=placement,
        )
        try:
            self.check()
            views = {spec.name: tensor_view(lease, spec.name) for spec in specs}
            yield Draft(lease_id=lease.id, tensors=views)
        except BaseException:
            lease.abandon(f"{self._participant} could not fill it")
            raise
        lease.seal()
        self._produced.setdefault(group, []).append(lease)
        if not self.view.groups[group].alive:
            self.forget(group)

    async def produce(
        self,
        name: str,
        group: GroupId,
        tensors: Mapping[str, TensorShape],
        fill: Callable[[Mapping[str, torch.Tensor]], object],
        *,
        consumers: Iterable[Participant],
        next_use: Task,
        placement: Placement,
    ) -> LeaseId:
        """Allocate a lease, let `fill` copy into its tensors, seal it."""
        async with self.writing(
            name, group, tensors, consumers=consumers, next_use=next_use, placement=placement
        ) as draft:
            await self._copied(lambda: fill(draft.tensors), draft)
        return draft.lease_id

    async def _copied(self, fill: Callable[[], object], draft: Draft) -> None:
        """Run a copy to its end, where it holds up the fewest."""
        if any(tensor.is_cuda for tensor in draft.tensors.values()):

            def on_device() -> None:
                fill()
                self._device.wait()

            await asyncio.get_running_loop().run_in_executor(self._compute, on_device)
        elif sum(tensor.nbytes for tensor in draft.tensors.values()) > INLINE_COPY_BYTES:
            await in_thread(fill)
        else:
            fill()

    async def read(self, storage: HeldWeights[Held], version: WeightsVersion) -> Held:
        """Hold a version of a storage until it is given back, or until `close`."""
        hold = await storage.hold_read(version, timeout_s=HOLD_TIMEOUT_S)
        self.keep(hold)
        return hold

    async def write(
        self, storage: Storage, version: WeightsVersion, *, timeout_s: float
    ) -> Rewriting:
        """Wait until every holder has let go, then be alone with a storage, to write a version."""
        rewriting = Rewriting(await storage.hold_write(version, timeout_s=timeout_s))
        self.keep(rewriting)
        return rewriting

    @asynccontextmanager
    async def exclusive(self, storage: Storage) -> AsyncIterator[Hold]:
        """Be the only one who writes an accumulator.

        The hold ends with the block, or, if the block is left by an error while its job may still
        be running, with the scope.
        """
        hold = await storage.hold_exclusive(self.plan.epoch, timeout_s=HOLD_TIMEOUT_S)
        self.keep(hold)
        yield hold
        self.give_back(hold)

    def keep(self, *held: Releasable) -> None:
        """Give all of it back when the epoch ends; at once, with StepOver, if it has ended."""
        if self.closed:
            for item in held:
                item.release()
            self.check()
        self._held.extend(held)

    def give_back(self, *held: Releasable) -> None:
        """Release before the end of the epoch."""
        for item in held:
            item.release()
            # `close` may be taking it out at this moment, in the compute thread.
            with contextlib.suppress(ValueError):
                self._held.remove(item)

    async def publish(
        self,
        body: Body,
        group: GroupId | None = None,
        *,
        span: WorkSpan | None = None,
        cause_id: str = "",
    ) -> None:
        """Send an event of this epoch. Raises StepOver if it has ended."""
        self.check()
        await self._publish(
            Event(
                sender=self._participant,
                run_id=self.plan.run_id,
                step=self.plan.step,
                epoch=self.plan.epoch,
                group=group,
                work=span,
                cause_id=cause_id,
                body=body,
            )
        )

    def forget(self, group: GroupId) -> None:
        """The group was dropped: nobody will acquire what was produced for it."""
        for lease in self._produced.pop(group, []):
            lease.abandon(f"group {group} was dropped")

    def end(self) -> None:
        """No further work and no further events; what is held stays until `close`."""
        self.closed = True

    def close(self) -> None:
        """Give everything back. Runs in the compute thread, behind the job that is running."""
        self.closed = True
        while self._held:
            self._held.pop().release()
        if self._governor is not None:
            self._governor.step_ended(self.plan.step, window_closed=self.view.window_closed)


def dtype_name(dtype: torch.dtype) -> DType:
    """The broker's name of a torch dtype."""
    return DType(str(dtype).removeprefix("torch."))
