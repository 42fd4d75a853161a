"""The state of one step, folded from the node's events.

Every process folds the same events in the same order, so every process asks the schedule about the
same facts. A view accepts events of its own run, step and epoch only, and of the rank of each
service that its process reads, one of each replica that shares groups with its own, or about every
rank; an event that it has already seen changes nothing. Of the groups of other replicas it has what
the rank that decides there says: the update is of them all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.events import Event, bodies
from common.events.bodies import ModelRole
from common.ids import WORKERS, Participant, Service
from common.step.partners import Partners
from common.step.place import Place
from common.step.plan import StepMode, StepPlan
from common.step.schedule import ORDER, OWN_WEIGHTS, TABLE, AccumulationOrder, Condition
from common.step.tasks import AHEAD, Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.ids import GroupId, LeaseId, WeightsVersion
    from common.step.plan import PlannedGroup

EVAL_TASKS: frozenset[Task] = frozenset(
    {Task.PREPARE, Task.POLICY_VISION, Task.DECODE, Task.REWARD, Task.AHEAD_PREPARE}
)
REFERENCE_TASKS: frozenset[Task] = frozenset(
    {Task.REFERENCE_PREFIX, Task.REFERENCE_SCORE, Task.AHEAD_REFERENCE}
)


@dataclass(slots=True, kw_only=True)
class GroupView:
    """What is known of one group; None: has not happened."""

    planned: PlannedGroup
    prepared: bodies.GroupPrepared | None = None
    dropped: bodies.GroupDropped | None = None
    vision: bodies.PolicyVisionEncoded | None = None
    prefixes: dict[ModelRole, bodies.PrefixEncoded] = field(default_factory=dict)
    generated: bodies.GroupGenerated | None = None
    rewarded: bodies.GroupRewarded | None = None
    scored: bodies.GroupScored | None = None
    trained: bodies.ResponsesTrained | None = None
    done: bool = False

    @property
    def group(self) -> GroupId:
        """Its index."""
        return self.planned.group

    @property
    def alive(self) -> bool:
        """Whether the group still takes part."""
        return self.dropped is None

    @property
    def completion(self) -> tuple[int, GroupId] | None:
        """Its place among those that its replica of the rollout completes; None: has none yet."""
        return None if self.generated is None else (self.generated.decode_iteration, self.group)

    @property
    def decodes(self) -> bool:
        """Whether its responses are still to come."""
        return self.alive and self.generated is None

    @property
    def rolled_out(self) -> bool:
        """Whether the rollout has nothing more to do for the group."""
        return not self.alive or (self.generated is not None and self.rewarded is not None)

    def leases(self) -> list[LeaseId]:
        """Every lease made for the group so far."""
        found = [
            self.prepared.prompt_lease if self.prepared else None,
            self.vision.lease if self.vision else None,
            *(prefix.lease for prefix in self.prefixes.values()),
            self.generated.lease if self.generated else None,
            self.scored.lease if self.scored else None,
            self.trained.lease if self.trained else None,
        ]
        return [lease for lease in found if lease is not None]


@dataclass(slots=True, kw_only=True)
class AheadView:
    """What is done for one group of the next step."""

    done: set[Task] = field(default_factory=set)


class StepView:
    """The folded state of one epoch of one step."""

    def __init__(
        self,
        plan: StepPlan,
        *,
        needs_reference: bool,
        lease_room_bytes: Mapping[str, int] | None = None,
        place: Place | None = None,
        partners: Partners | None = None,
        whose: Participant | None = None,
        whole: bool = False,
    ) -> None:
        """Args:
        lease_room_bytes: for the leases of its replica.
        place: whose leases and progress the view is about; None: of the only rank.
        partners: which ranks a process reads; None: every service has as many as `place` says.
        whose: the process that reads; None: one that reads the ranks of its own number.
        whole: whether it is about all replicas, as their deciding ranks see them.
        """
        self.plan = plan
        self.place = place or Place()
        self._partners = partners or Partners.alike(
            degree=self.place.degree, replicas=self.place.replicas
        )
        self._whose = whose or Participant(service=Service.LEARNER, rank=self.place.rank)
        self.whole = whole
        self.rollouts = self._partners.met(self._whose, Service.ROLLOUT)
        """The replicas of the rollout that decode its groups."""
        self.lease_room_bytes = lease_room_bytes or {}
        self.needs_reference = needs_reference
        self.everyone: dict[GroupId, GroupView] = {
            g.group: GroupView(planned=g) for g in plan.groups
        }
        """Groups of all replicas."""
        self.groups: dict[GroupId, GroupView] = {
            g.group: self.everyone[g.group] for g in plan.groups if whole or self._is_own(g)
        }
        """Those of this replica, or, where the view is about all of them, of all."""
        self.rolled = [
            g for g in self.everyone.values() if whole or g.planned.rollout_replica in self.rollouts
        ]
        """Those of `rollouts`, by index, whoever trains them."""
        self.ahead: dict[GroupId, AheadView] = {
            g.group: AheadView() for g in plan.ahead if whole or self._is_own(g)
        }
        self._opened: set[int] = set()
        self._closed: set[int] = set()
        """Replicas of the rollout whose window has opened, or closed."""
        self.published: bodies.WeightsPublished | None = None
        self.push: bodies.PushBegan | None = None
        self.pushed: bodies.PushEnded | None = None
        self.aborted: bodies.StepAborted | None = None
        self.failed: bodies.TaskFailed | None = None

    @property
    def window_opened(self) -> bool:
        """Whether a sequence of this step has begun to decode."""
        return bool(self._opened)

    @property
    def window_open(self) -> bool:
        """Whether sequences of this step decode at the moment."""
        return bool(self._opened - self._closed)

    @property
    def window_closed(self) -> bool:
        """Whether a decode has ended, and none goes on."""
        return bool(self._closed) and not self.window_open

    @property
    def version(self) -> WeightsVersion:
        """The weights version that the step reads."""
        return self.plan.weights_version

    def _is_own(self, planned: PlannedGroup) -> bool:
        return planned.replica_of(self._whose.service) == self.place.replica

    @property
    def living(self) -> list[GroupView]:
        """Of `groups`, those that still take part, by index."""
        return [g for g in self.groups.values() if g.alive]

    @property
    def living_everywhere(self) -> list[GroupView]:
        """The same of all replicas."""
        return [g for g in self.everyone.values() if g.alive]

    @property
    def response_tokens(self) -> int:
        """Sampled tokens of all living, generated groups of the step: its loss normalizer."""
        return sum(g.generated.response_tokens for g in self.living_everywhere if g.generated)

    @property
    def has_gradient(self) -> bool:
        """Whether any group of the step, of any replica, has added to the gradients."""
        trained = [g.trained for g in self.living_everywhere if g.trained]
        return any(one.lease is not None for one in trained)

    @property
    def rollout_over(self) -> bool:
        """Whether every group that decodes beside these, or is one of them, is generated and
        rewarded, or dropped."""
        return all(g.rolled_out for g in self.rolled)

    @property
    def accumulated(self) -> bool:
        """Whether every living group is wholly in the gradient accumulator."""
        return self.rollout_over and all(g.done for g in self.living)

    @property
    def accumulated_everywhere(self) -> bool:
        """The same of all replicas."""
        return self._rolled_out_everywhere and all(g.done for g in self.living_everywhere)

    @property
    def _rolled_out_everywhere(self) -> bool:
        return all(g.rolled_out for g in self.everyone.values())

    @property
    def reference_over(self) -> bool:
        """Whether every living group is scored, and none will come; or no reference is needed."""
        return not self.needs_reference or (
            self.rollout_over and all(g.scored is not None for g in self.living)
        )

    @property
    def finished(self) -> bool:
        """Whether the step needs nothing more from any service."""
        if self.plan.mode is StepMode.EVAL:
            return self._rolled_out_everywhere
        return self.published is not None

    def belongs(self, event: Event) -> bool:
        """Whether the event is about this epoch, and of a rank that is read here, or about another
        replica's group."""
        plan, sender, partners = self.plan, event.sender, self._partners
        if (event.run_id, event.step, event.epoch) != (plan.run_id, plan.step, plan.epoch):
            return False
        if type(event.body) in bodies.FOR_ALL_RANKS:
            return True
        if sender.service not in WORKERS:
            return True
        replica = partners.replica(sender)
        decides = partners.cut(sender).rank == 0
        if event.group is None:
            met = replica in partners.met(self._whose, sender.service)
            return self._reads(sender) if met else self.whole and decides
        if replica != self.everyone[event.group].planned.replica_of(sender.service):
            return False
        return self._reads(sender) if event.group in self.groups else decides

    def _reads(self, sender: Participant) -> bool:
        """Whether it is the rank of its replica that is read here."""
        replica = self._partners.replica(sender)
        return sender == self._partners.partner(self._whose, sender.service, replica=replica)

    def apply(self, event: Event) -> bool:
        """Fold one event in.

        Returns: whether it belonged to this epoch.
        """
        if not self.belongs(event):
            return False
        if event.group is not None:
            self._apply_group(self.everyone[event.group], event.body)
        else:
            self._apply_step(event)
        return True

    def _apply_step(self, event: Event) -> None:
        match event.body:
            case bodies.WindowOpened():
                self._opened.add(self._partners.replica(event.sender))
            case bodies.WindowClosed():
                self._closed.add(self._partners.replica(event.sender))
            case bodies.AheadDone(task=task, index=index):
                if index in self.ahead:
                    self.ahead[index].done.add(task)
            case bodies.PushBegan() as push:
                self.push = push
            case bodies.PushEnded() as pushed:
                self.pushed = pushed
            case bodies.WeightsPublished() as published:
                self.published = published
            case bodies.StepAborted() as aborted:
                self.aborted = aborted
            case bodies.TaskFailed() as failed:
                self.failed = failed
            case _:
                pass

    def _apply_group(self, state: GroupView, body: bodies.Body) -> None:
        match body:
            case bodies.GroupPrepared():
                state.prepared = body
            case bodies.GroupDropped():
                state.dropped = body
            case bodies.PolicyVisionEncoded():
                state.vision = body
            case bodies.PrefixEncoded():
                state.prefixes[body.role] = body
            case bodies.GroupGenerated():
                state.generated = body
            case bodies.GroupRewarded():
                state.rewarded = body
            case bodies.GroupScored():
                state.scored = body
            case bodies.ResponsesTrained():
                state.trained = body
            case bodies.PrefixBackpropagated():
                state.done = True
            case bodies.TaskFailed():
                self.failed = body
            case _:
                pass

    def wants(self, task: Task) -> bool:
        """Whether this step has such a task at all."""
        if self.plan.mode is StepMode.EVAL:
            own_vision = self.plan.schedule in OWN_WEIGHTS
            return task in EVAL_TASKS and not (own_vision and task is Task.POLICY_VISION)
        return self.needs_reference or task not in REFERENCE_TASKS

    def may_start(self, task: Task, group: GroupId | None) -> bool:
        """Ask the schedule; `group` is None for `UPDATE` alone, and of `plan.ahead` for `AHEAD`."""
        if self.aborted is not None or not self.wants(task):
            return False
        state: GroupView | AheadView | None = None
        if group is not None:
            state = self.ahead[group] if task in AHEAD else self.groups[group]
        if isinstance(state, GroupView) and not state.alive:
            return False
        return all(self.holds(c, state) for c in TABLE[self.plan.schedule][task])

    def subjects(self, task: Task) -> list[GroupId | None]:
        """The groups that a task is done for, in order; None: the whole step."""
        if task is Task.UPDATE:
            return [None]
        if task in AHEAD:
            return list(self.ahead)
        return [g.group for g in self.living]

    def holds(self, condition: Condition, state: GroupView | AheadView | None) -> bool:
        """Whether one condition is met now; group conditions need the group."""
        whole = _STEP_CONDITIONS.get(condition)
        if whole is not None:
            return whole(self)
        if condition is Condition.AHEAD_PREPARED:
            assert isinstance(state, AheadView), f"{condition} is about a group of the next step"
            return Task.AHEAD_PREPARE in state.done
        assert isinstance(state, GroupView), f"{condition} is about a group"
        if condition is Condition.PREVIOUS_DONE:
            return self._previous_done(state)
        if condition is Condition.SCORED:
            return state.scored is not None or not self.needs_reference
        return _GROUP_CONDITIONS[condition](state)

    def _previous_done(self, state: GroupView) -> bool:
        if ORDER[self.plan.schedule] is AccumulationOrder.GROUP:
            return all(g.done for g in self.living if g.group < state.group)
        mine = state.completion
        if mine is None or not all(self._is_past(mine, replica) for replica in self.rollouts):
            return False
        return all(g.done for g in self.living if g.completion is not None and g.completion < mine)

    def _is_past(self, completion: tuple[int, GroupId], replica: int) -> bool:
        """Whether a replica of the rollout has no more groups to complete before this one.

        It completes them in order.
        """
        its = [g for g in self.groups.values() if g.planned.rollout_replica == replica]
        reached = any(g.completion is not None and g.completion >= completion for g in its)
        return reached or not any(g.decodes for g in its)


def _reference_prefixes_encoded(view: StepView) -> bool:
    return not view.needs_reference or all(ModelRole.REFERENCE in g.prefixes for g in view.living)


_STEP_CONDITIONS = {
    Condition.WINDOW_OPENED: lambda v: v.window_opened or v.rollout_over,
    Condition.ROLLOUT_OVER: lambda v: v.rollout_over,
    Condition.REFERENCE_OVER: lambda v: v.reference_over,
    Condition.GROUPS_DONE: lambda v: v.accumulated_everywhere,
    Condition.WINDOW_OPEN: lambda v: v.window_open,
    Condition.GROUPS_PREPARED: lambda v: all(g.prepared is not None for g in v.living),
    Condition.REFERENCE_PREFIXES_ENCODED: _reference_prefixes_encoded,
    Condition.NEVER: lambda _: False,
}

_GROUP_CONDITIONS = {
    Condition.PREPARED: lambda g: g.prepared is not None,
    Condition.VISION_ENCODED: lambda g: g.vision is not None,
    Condition.POLICY_PREFIX_ENCODED: lambda g: ModelRole.POLICY in g.prefixes,
    Condition.REFERENCE_PREFIX_ENCODED: lambda g: ModelRole.REFERENCE in g.prefixes,
    Condition.GENERATED: lambda g: g.generated is not None,
    Condition.REWARDED: lambda g: g.rewarded is not None,
    Condition.RESPONSES_TRAINED: lambda g: g.trained is not None,
}
