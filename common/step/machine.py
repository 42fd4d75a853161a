"""Which of its tasks a service starts next: sans-IO, the same machine for every service.

Invariants:
- A task of a group is started at most once an epoch.
- Tasks of one lane run one after the other; lanes run beside each other.
- Among the tasks of a lane that may start, the order is that of `Lane.tasks`, then group order,
  except that a group-ordered task (see `Lane.strict`) waits for the groups before it.
- Of the tensor-parallel ranks of a replica, the first alone decides in collective lanes and numbers
  what it starts. The others start exactly that, in that order, each task once its own rank's inputs
  exist.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.events import Event, bodies
from common.ids import Participant
from common.step.place import Place
from common.step.view import StepView
from common.tensors.device import HOST

if TYPE_CHECKING:
    from common.ids import GroupId
    from common.step.partners import Partners
    from common.step.plan import StepPlan
    from common.step.tasks import Task


Subject = tuple["Task", "GroupId | None"]
Admits = Callable[["StepView", Collection[Subject], Subject], bool]
"""Whether memory lets a task of a group start: by the step's events, and by what was started, of
which not all need have come back as an event."""


def _always(_view: StepView, _started: Collection[Subject], _wanted: Subject) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Tasks that share one executor, in order of preference."""

    name: str
    tasks: tuple[Task, ...]
    width: int = 1
    """How many may run at once."""
    strict: bool = False
    """Whether a task of group g waits until it was started for all living groups before g."""
    collective: bool = False
    """Whether its tasks need the service's other ranks, if there are any."""
    admits: Admits = _always
    """Asked last of all, whenever a task could start; a task that is not admitted is passed over,
    and asked for again after the next event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTask:
    """Begin this work; it ends in exactly one `task_ended`."""

    task: Task
    group: GroupId | None
    """Of the step; for the tasks in `AHEAD`, of `StepPlan.ahead`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandTask:
    """Tell the service's other ranks that this task was started."""

    number: int
    task: Task
    group: GroupId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStep:
    """A new epoch: drop whatever belongs to the one before."""

    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class EndStep:
    """The epoch is over for this service: give back holds, graphs and accumulators."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetGroup:
    """The group was dropped: give back what is held for it."""

    group: GroupId


Instruction = StartTask | CommandTask | StartStep | EndStep | ForgetGroup


class StepMachine:
    """Folds events and names the tasks to start."""

    def __init__(
        self,
        lanes: tuple[Lane, ...],
        *,
        needs_reference: bool,
        participant: Participant | None = None,
        place: Place | None = None,
        partners: Partners | None = None,
    ) -> None:
        """Args:
        participant: whose machine it is; None: the only rank of a service.
        place: which of its ranks; None: the only one.
        partners: the ranks of all services; None: as many as `place` says.
        """
        self._lanes = lanes
        self._needs_reference = needs_reference
        self._participant = participant
        self._partners = partners
        self._place = place or Place()
        self._leader = (
            None
            if participant is None
            else Participant(service=participant.service, rank=self._place.leader)
        )
        self._commands: dict[int, Subject] = {}
        self._next_command = 1
        self._started: set[tuple[Task, GroupId | None]] = set()
        self._running: dict[tuple[Task, GroupId | None], Lane] = {}
        self.view: StepView | None = None

    def handle(self, event: Event) -> list[Instruction]:
        """Fold one event of the node's order and say what follows."""
        instructions: list[Instruction] = []
        if isinstance(event.body, bodies.StepBegan):
            return [*self._end("superseded"), *self._begin(event.body)]
        if self.view is None or not self.view.apply(event):
            return []
        if self.view.aborted is not None:
            return self._end(self.view.aborted.reason)
        if self.view.finished:
            return self._end("finished")
        if isinstance(event.body, bodies.GroupDropped) and event.group in self.view.groups:
            instructions.append(ForgetGroup(group=event.group))
        if isinstance(event.body, bodies.TaskCommanded) and event.sender == self._leader:
            self._commands[event.body.number] = (event.body.task, event.body.group)
        return [*instructions, *self._start_tasks()]

    def task_ended(self, task: Task, group: GroupId | None) -> list[Instruction]:
        """The lane is free again. Tasks of an older epoch have been forgotten already."""
        self._running.pop((task, group), None)
        return self._start_tasks()

    def reset(self) -> list[Instruction]:
        """Forget the step, as after the loss of the broker."""
        return self._end("reset")

    @property
    def running(self) -> list[tuple[Task, GroupId | None]]:
        """Tasks that have been started and have not ended."""
        return list(self._running)

    def _begin(self, began: bodies.StepBegan) -> list[Instruction]:
        self.view = StepView(
            began.plan,
            needs_reference=self._needs_reference,
            lease_room_bytes={
                device: self._share_of(device, size_bytes)
                for device, size_bytes in began.lease_room_bytes.items()
            },
            place=self._place,
            partners=self._partners,
            whose=self._participant,
        )
        return [StartStep(plan=began.plan), *self._start_tasks()]

    def _share_of(self, device: str, size_bytes: int) -> int:
        """Of the host's room all replicas have equal shares; no two have ranks on one GPU."""
        return size_bytes // self._place.replicas if device == HOST else size_bytes

    def _end(self, reason: str) -> list[Instruction]:
        if self.view is None:
            return []
        self.view = None
        self._started.clear()
        self._running.clear()
        self._commands.clear()
        self._next_command = 1
        return [EndStep(reason=reason)]

    def _start_tasks(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        for lane in self._lanes:
            while (found := self._next(lane)) is not None:
                self._started.add(found)
                self._running[found] = lane
                instructions.append(StartTask(task=found[0], group=found[1]))
                if lane.collective and self._place.degree > 1:
                    instructions += self._commanded(found)
        return instructions

    def _commanded(self, started: Subject) -> list[Instruction]:
        number = self._next_command
        self._next_command += 1
        if not self._place.leads:
            return []
        return [CommandTask(number=number, task=started[0], group=started[1])]

    def _next(self, lane: Lane) -> tuple[Task, GroupId | None] | None:
        if self.view is None or sum(r is lane for r in self._running.values()) >= lane.width:
            return None
        if lane.collective and not self._place.leads:
            commanded = self._commands.get(self._next_command)
            return commanded if commanded and self.view.may_start(*commanded) else None
        for task in lane.tasks:
            if not self.view.wants(task):
                continue
            for group in self.view.subjects(task):
                if (task, group) in self._started:
                    continue
                wanted = (task, group)
                if self.view.may_start(*wanted) and lane.admits(self.view, self._started, wanted):
                    return wanted
                if lane.strict:
                    break
        return None

    def validate(self) -> None:
        """Check the invariants; for tests."""
        assert self._running.keys() <= self._started
        for lane in self._lanes:
            assert sum(r is lane for r in self._running.values()) <= lane.width
        if self.view is None:
            assert not self._started
