"""Per-step metrics and the timeline, folded from the node's events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.events import Event, WorkSpan, bodies
from common.ids import Participant, Service
from common.step.partners import Partners
from common.step.place import Place
from common.step.plan import StepMode, StepPlan
from common.step.tasks import WEIGHTS_DEPENDENT, Task
from common.step.view import StepView
from services.controller.graph_tally import GraphTally
from services.controller.move_tally import MoveTally
from services.controller.record import SpanRecord, StepRecord
from services.controller.refresh_tally import RefreshTally

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from services.controller.plans import RunSettings

WINDOW_TASK = "window"
"""`task` of the timeline lines that show the decode window."""

ADMIT_TASK = "admit"
"""`task` of the timeline lines from the first admission to the opening of the window: prefills of
the engine's own, or copies of prefixes, and waits for the groups that come first."""

_NS_PER_S = 1e9
_WINDOW_EDGES = (bodies.WindowOpened, bodies.WindowClosed)
_PREFIX_TASKS = frozenset({Task.POLICY_PREFIX, Task.REFERENCE_PREFIX, Task.AHEAD_REFERENCE})
_VISION_TASKS = frozenset({Task.POLICY_VISION, Task.AHEAD_VISION})

Span = tuple[int, int]


class StepObserver:
    """The controller's view of one epoch: progress, metrics, spans.

    Times are nanoseconds of the node's monotonic clock, which all of its processes share.
    """

    def __init__(
        self,
        plan: StepPlan,
        *,
        needs_reference: bool,
        place: Place | None = None,
        partners: Partners | None = None,
        late: MoveTally | None = None,
    ) -> None:
        """Args:
        place: of the rank of training that speaks for all; None: the only one.
        partners: the ranks of all services; None: as many as `place` says.
        late: moves of the step before that end now; others may still add to it.
        """
        place = place or Place()
        self._partners = partners or Partners.alike(degree=place.degree, replicas=place.replicas)
        self.view = StepView(
            plan,
            needs_reference=needs_reference,
            place=place,
            partners=self._partners,
            whole=True,
        )
        self.began_ns: int | None = None
        self._ended_ns: int | None = None
        self._spans: list[tuple[Event, WorkSpan]] = []
        self._windows: list[tuple[int, Span]] = []
        self._admissions: list[tuple[int, Span]] = []
        self._window_starts_ns: dict[int, int] = {}
        self._iterations: dict[int, int] = {}
        self._seen: set[str] = set()
        self._graphs = GraphTally()
        self._moves = MoveTally(plan)
        self._late = late or MoveTally(None)
        self._refreshes = RefreshTally()

    @classmethod
    def of(cls, settings: RunSettings, plan: StepPlan, *, late: MoveTally | None) -> StepObserver:
        """Of a run's step."""
        return cls(
            plan,
            needs_reference=settings.needs_reference,
            place=settings.place,
            partners=settings.partners,
            late=late,
        )

    @property
    def finished(self) -> bool:
        """Whether the step needs nothing more from any service."""
        return self.view.finished

    @property
    def dropped(self) -> int:
        """Groups that were dropped so far."""
        return sum(not group.alive for group in self.view.groups.values())

    @property
    def update_end_ns(self) -> int | None:
        """When the update ended; None: it has not."""
        ends = [span.end_ns for _, span in self._spans if span.task is Task.UPDATE]
        return max(ends) if ends else None

    def apply(self, event: Event, received_ns: int) -> bool:
        """Fold one event in; a repeated one changes nothing.

        Returns: whether it belonged to this epoch and was new.
        """
        if event.event_id in self._seen or not self.view.apply(event):
            return False
        self._seen.add(event.event_id)
        self._graphs.apply(event)
        self._moves.apply(event)
        self._refreshes.apply(event)
        if event.work is not None and not isinstance(event.body, _WINDOW_EDGES):
            self._spans.append((event, event.work))
        match event.body:
            case bodies.StepBegan():
                self.began_ns = received_ns
            case bodies.WindowOpened():
                start_ns = event.work.end_ns if event.work else received_ns
                self._window_starts_ns[event.sender.rank] = start_ns
                if event.work is not None and event.work.start_ns < event.work.end_ns:
                    admission = (event.work.start_ns, event.work.end_ns)
                    self._admissions.append((event.sender.rank, admission))
            case bodies.WindowClosed():
                self._iterations[event.sender.rank] = event.body.decode_iterations
                end_ns = event.work.end_ns if event.work else received_ns
                opened_ns = self._window_starts_ns.pop(event.sender.rank, None)
                if opened_ns is not None:
                    self._windows.append((event.sender.rank, (opened_ns, end_ns)))
            case _:
                pass
        if self.view.finished and self._ended_ns is None:
            self._ended_ns = received_ns
        return True

    def record(self, previous_update_end_ns: int | None) -> StepRecord:
        """The record of the finished step.

        Args:
            previous_update_end_ns: end of the update that made these weights; None: not seen.
        """
        plan = self.view.plan
        wall_s = self._wall_s()
        metrics = {
            **self._learner_metrics(),
            **self._rollout_metrics(wall_s),
            **self._time_metrics(),
            **self._moves.metrics(self._late),
            **self._refreshes.metrics(),
        }
        if plan.mode is StepMode.TRAIN:
            metrics |= self._graphs.metrics()
        if plan.mode is StepMode.TRAIN:
            margin = self._update_order_margin_s(previous_update_end_ns)
            if margin is not None:
                metrics["update_order_margin_s"] = margin
        return StepRecord(
            step=plan.step,
            epoch=plan.epoch,
            mode=plan.mode,
            weights_version=(
                self.view.published.weights_version if self.view.published else plan.weights_version
            ),
            wall_s=wall_s,
            metrics=metrics,
        )

    def spans(self) -> tuple[SpanRecord, ...]:
        """All work of the epoch by start, decode windows included."""
        plan = self.view.plan
        rows = [
            _span_record(
                plan,
                event.group,
                span.task,
                event.sender,
                (span.start_ns, span.end_ns),
                sms=span.sms,
            )
            for event, span in self._spans
        ]
        for task, spans in ((WINDOW_TASK, self._windows), (ADMIT_TASK, self._admissions)):
            for rank, span in spans:
                rollout = Participant(service=Service.ROLLOUT, rank=rank)
                rows.append(_span_record(plan, None, task, rollout, span))
        return tuple(sorted(rows, key=lambda row: (row.start_ns, row.end_ns, row.task)))

    def _wall_s(self) -> float:
        if self.began_ns is None or self._ended_ns is None:
            return 0.0
        return (self._ended_ns - self.began_ns) / _NS_PER_S

    def _rollout_metrics(self, wall_s: float) -> dict[str, float]:
        living = self.view.living
        rewards = [r for g in living if g.rewarded for r in g.rewarded.rewards]
        tokens = self.view.response_tokens
        prompt_tokens = sum(g.prepared.prompt_tokens for g in living if g.prepared)
        metrics = {
            "groups": float(len(living)),
            "groups_dropped": float(self.dropped),
            "reward_failures": float(sum(g.rewarded.failures for g in living if g.rewarded)),
            "response_tokens": float(tokens),
            "prompt_tokens": float(prompt_tokens),
        }
        if wall_s > 0:
            metrics["tokens_per_s"] = tokens / wall_s
        if rewards:
            metrics["reward_mean"] = sum(rewards) / len(rewards)
            metrics["response_tokens_mean"] = tokens / len(rewards)
        return metrics

    def _time_metrics(self) -> dict[str, float]:
        by_task: dict[Task, list[Span]] = {}
        for _, span in self._spans:
            by_task.setdefault(span.task, []).append((span.start_ns, span.end_ns))
        metrics = {f"time_{task}_s": covered_ns(s) / _NS_PER_S for task, s in by_task.items()}
        shared = [(span.end_ns - span.start_ns, span.sms) for _, span in self._spans if span.sms]
        if shared_ns := sum(length_ns for length_ns, _ in shared):
            metrics["sm_share_mean"] = sum(ns * sms for ns, sms in shared) / shared_ns
            metrics["time_governed_s"] = shared_ns / _NS_PER_S
        slowdown = governed_slowdown([span for _, span in self._spans])
        if slowdown is not None:
            metrics["governed_decode_slowdown"] = slowdown
        metrics["time_admit_s"] = covered_ns([span for _, span in self._admissions]) / _NS_PER_S
        metrics["window_s"] = covered_ns([span for _, span in self._windows]) / _NS_PER_S
        return metrics | self._decode_metrics() | self._overlap_metrics()

    def _decode_metrics(self) -> dict[str, float]:
        """Of the slowest rank's iterations, and of all tokens in the windows."""
        iterations = [
            ((closed - opened) / self._iterations[rank], self._iterations[rank])
            for rank, (opened, closed) in self._windows
            if self._iterations[rank]
        ]
        covered = covered_ns([span for _, span in self._windows])
        if not iterations or not covered:
            return {}
        slowest_ns, count = max(iterations)
        return {
            "decode_iterations": float(count),
            "decode_iteration_s": slowest_ns / _NS_PER_S,
            "decode_tokens_per_s": self.view.response_tokens * _NS_PER_S / covered,
        }

    def _overlap_metrics(self) -> dict[str, float]:
        """What of the work lies in windows of its own family of replicas."""
        partners = self._partners
        windows = [
            (partners.family(Participant(service=Service.ROLLOUT, rank=rank)), span)
            for rank, span in self._windows
        ]
        prefixes = self._by_family(_PREFIX_TASKS)
        first: dict[int, int] = {}
        for group in self.view.living:
            (rollout, *_) = partners.all(Service.ROLLOUT, replica=group.planned.rollout_replica)
            first.setdefault(partners.family(rollout), group.group)
        # No window can open before its first group's vision is encoded: that one never hides.
        vision = self._by_family(_VISION_TASKS, without=first.values())
        metrics: dict[str, float] = {}
        for name, spans in (
            ("prefix_overlap_fraction", prefixes),
            ("hidden_fraction", prefixes + vision),
        ):
            share = overlap_fraction(spans, windows)
            if share is not None:
                metrics[name] = share
        return metrics

    def _by_family(
        self, tasks: frozenset[Task], *, without: Collection[int] = ()
    ) -> list[tuple[int, Span]]:
        """Spans of some tasks, but for those of some groups, with their family's number."""
        return [
            (self._partners.family(event.sender), (span.start_ns, span.end_ns))
            for event, span in self._spans
            if span.task in tasks and event.group not in without
        ]

    def _learner_metrics(self) -> dict[str, float]:
        return dict(self.view.published.metrics) if self.view.published else {}

    def _update_order_margin_s(self, update_end_ns: int | None) -> float | None:
        starts = [s.start_ns for _, s in self._spans if s.task in WEIGHTS_DEPENDENT]
        if update_end_ns is None or not starts:
            return None
        return (min(starts) - update_end_ns) / _NS_PER_S


def overlap_fraction(
    spans: Sequence[tuple[int, Span]], windows: Sequence[tuple[int, Span]]
) -> float | None:
    """Share of the spans' total time that lies inside windows of the same family.

    Args:
        spans, windows: each with the number of its family.
    Returns: 0 to 1; None where the spans have no length.
    """
    total = sum(end - start for _, (start, end) in spans)
    if total <= 0:
        return None
    inside = sum(
        covered_ns(
            [
                (max(start, opened), min(end, closed))
                for other, (opened, closed) in windows
                if family == other and max(start, opened) < min(end, closed)
            ]
        )
        for family, (start, end) in spans
    )
    return inside / total


def governed_slowdown(spans: Sequence[WorkSpan]) -> float | None:
    """How much slower the decode was beside jobs whose effect on it was measured.

    Returns: time of the jobs over the time that the decode alone would have taken for what it did
    meanwhile; None where nothing was measured.
    """
    measured = [(span.end_ns - span.start_ns, span.decode_rate) for span in spans]
    decoded_ns = sum(length_ns * rate for length_ns, rate in measured if rate > 0)
    if decoded_ns <= 0:
        return None
    return sum(length_ns for length_ns, rate in measured if rate > 0) / decoded_ns


def covered_ns(spans: Sequence[Span]) -> int:
    """Length of the union of the spans: groups decode at the same time."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _span_record(
    plan: StepPlan,
    group: int | None,
    task: str,
    participant: Participant,
    span: Span,
    *,
    sms: int = 0,
) -> SpanRecord:
    return SpanRecord(
        run=plan.run_id,
        step=plan.step,
        epoch=plan.epoch,
        mode=plan.mode,
        group=group,
        task=str(task),
        participant=str(participant),
        start_ns=span[0],
        end_ns=span[1],
        sms=sms,
    )
