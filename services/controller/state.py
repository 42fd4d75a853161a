"""The run machine: decides, does nothing itself.

Invariants:
- One piece of work is under way at a time, and it has the machine's newest ticket.
- `record` is what the ledger will hold once the instructions so far are done; a record always comes
  before the work that relies on it.
- An epoch is begun at most once, and a step counts only when its record is on disk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.actor.machine import StateCell
from common.errors import FailedPrecondition
from common.events import bodies
from common.ids import Epoch, StepIndex, WeightsVersion
from common.step.plan import StepMode, StepPlan
from services.controller import instructions as do
from services.controller import messages as got
from services.controller.liveness import Liveness, RestartBudget
from services.controller.metrics import StepObserver
from services.controller.move_tally import MoveTally
from services.controller.phase import ENDED, ON_DISK_FIRST, STATE_OF, TABLE, Phase
from services.controller.record import History, RunRecord, RunState, StopRequest
from services.controller.verdict import is_fatal, judge

if TYPE_CHECKING:
    from services.controller.config import FailurePolicy
    from services.controller.plans import RunSettings

_STEP_PHASES = frozenset({Phase.BEGINNING, Phase.STEPPING})
_WATCHED = frozenset(
    {
        Phase.CONFIGURING,
        Phase.PLANNING,
        Phase.BEGINNING,
        Phase.STEPPING,
        Phase.CHECKPOINTING,
        Phase.PAUSED,
    }
)
"""Phases in which a death or the loss of the broker costs the workers' state."""


class RunMachine:
    """One run, from the queue to its end."""

    def __init__(
        self,
        record: RunRecord,
        settings: RunSettings,
        policy: FailurePolicy,
        history: History | None = None,
    ) -> None:
        """Args: history: what the journal says about a run that was begun before."""
        self.record = record
        self.settings = settings
        self.policy = policy
        self.observer: StepObserver | None = None
        self._late = MoveTally(None)
        self.waiting_for: tuple[str, ...] = ()
        self._saved = record
        self._cell = StateCell(TABLE, record.run_id, Phase.PENDING)
        self._ticket = 0
        self._deadline_s = 0.0
        self._out: list[do.Instruction] = []
        self._evaluated = {
            version: reward
            for version, reward in (history or History()).evaluated.items()
            if version <= record.steps_done
        }
        self._requests: list[int] = []
        self._registry_away = False
        self._liveness = Liveness()
        self._budget = RestartBudget(policy)
        self._lost = ""
        self._broker_alive = True
        self._next_mode = StepMode.TRAIN
        self._update_end_ns: int | None = None
        self._outcome = (RunState.FAILED, "")

    @property
    def phase(self) -> Phase:
        """Where the run is."""
        return self._cell.state

    @property
    def ticket(self) -> int:
        """The ticket of the work that is under way."""
        return self._ticket

    def handle(self, message: got.Message) -> list[do.Instruction]:
        """Take one message and say what is to be done, in this order.

        Raises:
            FailedPrecondition: a client's command that the state does not allow; nothing changed.
        """
        self._out = []
        if self._answers_old_work(message):
            return []
        match message:
            case got.Started():
                self._gather()
            case (
                got.PauseRequested()
                | got.ResumeRequested()
                | got.StopRequested()
                | got.CheckpointRequested()
            ):
                self._command(message)
            case got.NodeEvent():
                self._node_event(message)
            case got.BrokerLost():
                self._broker_alive = False
                self._lose(message.reason)
            case got.WorkFailed():
                self._work_failed(message)
            case got.DeadlinePassed():
                self._deadline_passed()
            case _:
                self._work_done(message)
        if self.record != self._saved:
            self._out.insert(0, do.SaveRun(record=self.record))
            self._saved = self.record
        return self._out

    def validate(self) -> None:
        """Check the invariants; for tests."""
        if self.phase is not Phase.PENDING:
            expected = STATE_OF.get(self.phase, self.record.state)
            assert self.record.state is expected, (self.record.state, self.phase)
        assert (self.observer is not None) == (self.phase in _STEP_PHASES), self.phase
        assert self.record == self._saved
        assert not (self.phase in ENDED and self._requests)
        if self.observer is not None:
            assert self.observer.view.plan.epoch == self.record.epoch

    def _command(self, message: got.Command) -> None:
        if self.phase in ENDED or self.phase is Phase.ENDING:
            outcome = self.record.state if self.phase in ENDED else self._outcome[0]
            raise FailedPrecondition(
                f"run {self.record.run_id} has {outcome.value}; it takes no commands any more"
            )
        match message:
            case got.PauseRequested():
                self._update(pause_requested=True)
            case got.ResumeRequested():
                self._update(pause_requested=False)
                if self.phase is Phase.PAUSED:
                    self._advance()
            case got.StopRequested():
                self._stop(after_step=message.after_step, now_unix_ms=message.now_unix_ms)
            case got.CheckpointRequested():
                if self.phase is Phase.PENDING:
                    raise FailedPrecondition(
                        f"run {self.record.run_id} has not started; there is nothing to save yet"
                    )
                self._requests.append(message.request)
                if self.phase is Phase.PAUSED:
                    self._advance()

    def _stop(self, *, after_step: bool, now_unix_ms: int) -> None:
        wanted = StopRequest.AFTER_STEP if after_step else StopRequest.NOW
        self._update(stop_requested=wanted)
        if self.phase in ON_DISK_FIRST or self.phase is Phase.CHECKPOINTING:
            return
        step_runs = self.phase in _STEP_PHASES or self.phase is Phase.PLANNING
        if after_step and step_runs:
            return
        if self.phase is Phase.PENDING:
            self._outcome = (RunState.STOPPED, "stopped by a client")
            self._go(Phase.ENDING, "stopped by a client")
            self._close(now_unix_ms)
        else:
            self._end(RunState.STOPPED, "stopped by a client")

    def _answers_old_work(self, message: got.Message) -> bool:
        ticket = getattr(message, "ticket", None)
        return ticket is not None and ticket != self._ticket

    def _work_done(self, message: got.Message) -> None:
        match message:
            case got.ServicesMissing():
                self.waiting_for = message.waiting_for
                self._registry_away = message.registry_away
            case got.ServicesReady():
                self.waiting_for = ()
                self._go(Phase.FENCING, "every service is SERVING")
                self._do(do.TakeEpoch(ticket=self._ticket, run_id=self.record.run_id))
            case got.EpochTaken():
                self._epoch_taken(message.epoch)
            case got.WorkersConfigured():
                self._configured(message)
            case got.StepsAdopted():
                self._update(latest=dict(message.metrics) or self.record.latest)
                self._advance()
            case got.StepBegun():
                self._step_begun()
            case got.StepCommitted():
                self._budget.reset()
                self._advance()
            case got.CheckpointSaved():
                self._checkpoint_saved(message)
            case got.StepAbandoned():
                self._gather()
            case got.RunClosed():
                self._close(message.now_unix_ms)
            case _:
                raise AssertionError(f"{type(message).__name__} has no handler")

    def _epoch_taken(self, epoch: Epoch) -> None:
        previous = Epoch(self.record.epoch)
        self._update(epoch=epoch)
        if self.phase is Phase.FENCING:
            self._liveness.forget()
            self._broker_alive = True
            self._go(Phase.CONFIGURING, f"epoch {epoch}", self.policy.configure_deadline_s)
            self._do(
                do.ConfigureWorkers(
                    ticket=self._ticket, record=self.record, epoch=epoch, previous_epoch=previous
                )
            )
            return
        step, run_id = StepIndex(self.record.steps_done), self.record.run_id
        make = (
            self.settings.eval_plan
            if self._next_mode is StepMode.EVAL
            else self.settings.train_plan
        )
        plan: StepPlan = make(run_id, step, epoch)
        self._go(Phase.BEGINNING, f"epoch {epoch}", self.settings.deadline_s(plan))
        self.observer = StepObserver.of(self.settings, plan, late=self._late)
        self._do(do.BeginStep(ticket=self._ticket, plan=plan))

    def _configured(self, message: got.WorkersConfigured) -> None:
        cause = self._liveness.configured(message.incarnations)
        if cause:
            self._recover(cause)
            return
        version, done = message.weights_version, self.record.steps_done
        if self.record.first_version is None:
            self._update(first_version=version, steps_done=version)
        elif version < done:
            self._rewind(version)
        elif version > done:
            self._update(steps_done=version)
            self._go(Phase.ADOPTING, f"the learner holds version {version}, the journal {done}")
            self._do(
                do.AdoptSteps(
                    ticket=self._ticket,
                    run_id=self.record.run_id,
                    epoch=Epoch(self.record.epoch),
                    first_step=StepIndex(done),
                    version=version,
                )
            )
            return
        self._advance()

    def _rewind(self, version: WeightsVersion) -> None:
        self._note(
            f"the learner's durable state is version {version}: steps {version} to "
            f"{self.record.steps_done - 1} are run again"
        )
        self._evaluated = {v: r for v, r in self._evaluated.items() if v <= version}
        self._update(steps_done=version)
        self._do(
            do.RewindRun(run_id=self.record.run_id, epoch=Epoch(self.record.epoch), version=version)
        )

    def _step_begun(self) -> None:
        assert self.observer is not None
        # The timer of BEGINNING goes on: the deadline is for the whole step.
        self._cell.move(Phase.STEPPING, "StepBegan")
        if self.observer.finished:
            self._commit(self.observer)

    def _checkpoint_saved(self, message: got.CheckpointSaved) -> None:
        self._update(checkpoint_version=message.weights_version)
        self._answer(path=message.path, version=message.weights_version)
        self._note(f"checkpoint of version {message.weights_version} is in {message.path}")
        self._advance()

    def _work_failed(self, message: got.WorkFailed) -> None:
        cause = f"{message.what}: {message.message}"
        if self.phase is Phase.CHECKPOINTING and not message.retryable and self._requests:
            self._answer(error=cause)
            if self.settings.place.world == 1:
                self._advance()
            else:
                self._note(f"the ranks are configured anew: {cause}")
                self._gather()
        elif is_fatal(message.code, retryable=message.retryable):
            self._end(RunState.FAILED, cause)
        else:
            self._recover(cause)

    def _deadline_passed(self) -> None:
        if self.phase is Phase.ABORTING:
            self._gather()
        elif self.phase is not Phase.GATHERING:
            self._recover(f"{self._cell.state} took over {self._deadline_s:g} s")
        elif self._registry_away:
            self._arm(self.policy.services_deadline_s)
        else:
            missing = "; ".join(self.waiting_for) or "no answer from the registry"
            self._end(
                RunState.FAILED,
                f"after {self._deadline_s:g} s not every service is SERVING: {missing}",
            )

    def _node_event(self, message: got.NodeEvent) -> None:
        event, observer = message.event, self.observer
        if isinstance(event.body, bodies.ParticipantDied):
            self._died(event.body)
            return
        if observer is None or not observer.apply(event, message.received_ns):
            self._late.apply(event)
            return
        if isinstance(event.body, bodies.StepBegan):
            self._liveness.step_began()
        verdict = judge(event, observer, self.settings, self.record.samples_dropped)
        if verdict is not None and verdict.fatal:
            self._end(RunState.FAILED, verdict.cause)
        elif verdict is not None:
            self._recover(verdict.cause)
        elif observer.finished and self.phase is Phase.STEPPING:
            self._commit(observer)

    def _died(self, body: bodies.ParticipantDied) -> None:
        if self.phase is Phase.CONFIGURING:
            self._liveness.died_while_configuring(body)
        elif self._liveness.matters(body):
            self._lose(f"{body.participant} died: {body.reason}")

    def _lose(self, cause: str) -> None:
        if self.phase in ON_DISK_FIRST:
            self._lost = cause
        elif self.phase in _WATCHED:
            self._recover(cause)

    def _advance(self) -> None:
        """Between two steps: decide what comes next."""
        version = self.record.steps_done
        first = self.record.first_version
        assert first is not None
        due = (
            self.settings.checkpoint_due(version)
            and version > first
            and self.record.checkpoint_version != version
        )
        if self._lost:
            cause, self._lost = self._lost, ""
            self._recover(cause)
        elif self.record.stop_requested is not StopRequest.NONE:
            self._end(RunState.STOPPED, "stopped by a client")
        elif self._requests or due:
            self._go(
                Phase.CHECKPOINTING,
                "a client wants one" if self._requests else "it is due",
                self.policy.checkpoint_deadline_s,
            )
            self._do(
                do.SaveCheckpoint(
                    ticket=self._ticket,
                    run_id=self.record.run_id,
                    epoch=Epoch(self.record.epoch),
                )
            )
        elif self.record.pause_requested:
            if self.phase is not Phase.PAUSED:
                self._go(Phase.PAUSED, "a client wants a pause")
        elif self.settings.eval_due(version, first) and version not in self._evaluated:
            self._plan(StepMode.EVAL)
        elif version >= self.settings.steps:
            self._end(RunState.SUCCEEDED, "")
        else:
            self._plan(StepMode.TRAIN)

    def _plan(self, mode: StepMode) -> None:
        self._next_mode = mode
        self._go(Phase.PLANNING, f"next is {mode}")
        self._do(do.TakeEpoch(ticket=self._ticket, run_id=self.record.run_id))

    def _commit(self, observer: StepObserver) -> None:
        step = observer.record(self._update_end_ns)
        self._late = MoveTally(observer.view.plan)
        if step.mode is StepMode.EVAL:
            self._evaluated[step.weights_version] = step.metrics.get("reward_mean", 0.0)
            self._update(**self._eval_rewards(step.weights_version))
        else:
            self._update_end_ns = observer.update_end_ns
            self._update(
                steps_done=step.weights_version,
                latest=step.metrics,
                samples_dropped=self.record.samples_dropped + observer.dropped,
            )
        spans = observer.spans()
        self._go(Phase.COMMITTING, f"{step.mode} of step {step.step} is done")
        self._do(do.CommitStep(ticket=self._ticket, record=self.record, step=step, spans=spans))
        self._saved = self.record

    def _eval_rewards(self, version: int) -> dict[str, float]:
        name = "before" if version == self.record.first_version else "after"
        return {f"eval_reward_{name}": self._evaluated[version]}

    def _recover(self, cause: str) -> None:
        if self.record.stop_requested is StopRequest.NOW:
            self._end(RunState.STOPPED, "stopped by a client")
            return
        if not self._budget.spend():
            attempts = self._budget.spent
            self._end(
                RunState.FAILED,
                f"no step was committed in {attempts} attempts; the last cause: {cause}",
            )
            return
        self._update(restarts=self.record.restarts + 1)
        self._note(f"begins again: {cause}")
        if self.phase not in _STEP_PHASES:
            self._gather()
            return
        assert self.observer is not None
        plan = self.observer.view.plan
        self._go(Phase.ABORTING, cause, self.policy.abort_deadline_s)
        self._do(
            do.AbortStep(
                ticket=self._ticket,
                run_id=plan.run_id,
                step=plan.step,
                epoch=plan.epoch,
                reason=cause,
                broker_alive=self._broker_alive,
            )
        )

    def _gather(self) -> None:
        delay_s = self._budget.delay_s
        self._registry_away = False
        self._go(Phase.GATHERING, "services", self.policy.services_deadline_s + delay_s)
        self._do(do.GatherServices(ticket=self._ticket, delay_s=delay_s))

    def _end(self, outcome: RunState, reason: str) -> None:
        self._outcome = (outcome, reason)
        self._answer(error=f"the run has {outcome.value} before the checkpoint")
        self._go(Phase.ENDING, reason or outcome.value)
        self._do(
            do.CloseRun(
                ticket=self._ticket,
                run_id=self.record.run_id,
                epoch=Epoch(self.record.epoch),
                reason=reason or outcome.value,
            )
        )

    def _close(self, now_unix_ms: int) -> None:
        outcome, reason = self._outcome
        self._go(Phase(outcome.value), reason or "done")
        self._update(reason=reason, ended_unix_ms=now_unix_ms)
        self._do(do.RunOver(run_id=self.record.run_id, outcome=outcome))

    def _go(self, phase: Phase, cause: str, deadline_s: float | None = None) -> None:
        self._cell.move(phase, cause)
        self._ticket += 1
        self.observer = None
        self._update(state=STATE_OF.get(phase, self.record.state))
        if deadline_s is None:
            self._do(do.DisarmDeadline())
        else:
            self._arm(deadline_s)

    def _arm(self, seconds: float) -> None:
        self._deadline_s = seconds
        self._do(do.ArmDeadline(ticket=self._ticket, seconds=seconds))

    def _answer(self, *, path: str = "", version: int = 0, error: str = "") -> None:
        if self._requests:
            self._do(
                do.AnswerCheckpoint(
                    requests=tuple(self._requests),
                    path=path,
                    weights_version=WeightsVersion(version),
                    error=error,
                )
            )
            self._requests.clear()

    def _note(self, text: str) -> None:
        self._do(do.Note(text=text))

    def _do(self, instruction: do.Instruction) -> None:
        self._out.append(instruction)

    def _update(self, **changes: object) -> None:
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
