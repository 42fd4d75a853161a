"""The run machine: the plain course of a run, and what clients ask for."""

from __future__ import annotations

import pytest

from common.actor.machine import InvalidTransition
from common.errors import FailedPrecondition
from common.events import bodies
from common.step.plan import StepMode
from common.step.schedule import Schedule
from services.controller import instructions as do
from services.controller import messages as got
from services.controller.phase import Phase
from services.controller.record import RunState, StopRequest
from tests.unit.controller.kit import Driver


def test_a_run_without_evaluation_goes_through_its_steps():
    driver = Driver()
    driver.configure()
    for _ in range(3):
        driver.train_step()
    # The last version is checkpointed unasked.
    assert driver.phase is Phase.CHECKPOINTING
    driver.tell(got.CheckpointSaved(ticket=driver.ticket, path="/c/3", weights_version=3))
    driver.close()
    assert driver.record.state is RunState.SUCCEEDED
    assert driver.record.steps_done == 3
    assert driver.record.ended_unix_ms == 77
    plans = [i.plan for i in driver.all(do.BeginStep)]
    assert [(p.step, p.weights_version, p.epoch) for p in plans] == [
        (0, 0, 2),
        (1, 1, 3),
        (2, 2, 4),
    ]
    assert [[g.sample for g in p.groups] for p in plans] == [[0, 1], [2, 3], [4, 5]]
    assert all(p.mode is StepMode.TRAIN and not p.greedy for p in plans)
    assert driver.last(do.RunOver).outcome is RunState.SUCCEEDED


def test_every_epoch_is_taken_once():
    driver = Driver()
    driver.configure()
    driver.train_step()
    driver.train_step()
    epochs = [i.plan.epoch for i in driver.all(do.BeginStep)]
    assert len(set(epochs)) == len(epochs)
    assert len(driver.all(do.TakeEpoch)) == 4


def test_a_record_is_saved_before_the_work_that_relies_on_it():
    driver = Driver()
    first = driver.tell(got.Started())
    assert isinstance(first[0], do.SaveRun)
    assert first[0].record.state is RunState.CONFIGURING
    driver.configure()
    driver.begin()
    driver.publish()
    commit = driver.last(do.CommitStep)
    assert commit.record.steps_done == 1
    assert commit.record.latest["loss"] == 0.5
    assert commit.step.weights_version == 1
    # Nothing may be asked of the workers before the commit is on disk.
    assert driver.phase is Phase.COMMITTING


def test_evaluations_come_before_the_first_step_after_the_last_and_between():
    driver = Driver(steps=4, eval_rows=3, eval_every_steps=2)
    driver.configure()
    driver.evaluate(0.25)
    driver.train_step()
    driver.train_step()
    driver.evaluate(0.5)
    driver.train_step()
    driver.train_step()
    driver.tell(got.CheckpointSaved(ticket=driver.ticket, path="/c", weights_version=4))
    driver.evaluate(0.75)
    driver.close()
    record = driver.record
    assert (record.eval_reward_before, record.eval_reward_after) == (0.25, 0.75)
    plans = [i.plan for i in driver.all(do.BeginStep) if i.plan.mode is StepMode.EVAL]
    assert [p.weights_version for p in plans] == [0, 2, 4]
    for plan in plans:
        assert plan.schedule is Schedule.SERIAL
        assert (plan.samples_per_group, plan.greedy) == (1, True)
        assert [(g.split, g.sample) for g in plan.groups] == [("eval", 0), ("eval", 1), ("eval", 2)]
    evals = [i.step for i in driver.all(do.CommitStep) if i.step.mode is StepMode.EVAL]
    assert [step.metrics["reward_mean"] for step in evals] == [0.25, 0.5, 0.75]


def test_pause_waits_for_the_running_step_and_resume_goes_on():
    driver = Driver()
    driver.configure()
    driver.begin()
    driver.tell(got.PauseRequested())
    assert driver.phase is Phase.STEPPING
    assert driver.record.pause_requested
    driver.publish()
    driver.commit()
    assert driver.phase is Phase.PAUSED
    assert driver.record.state is RunState.PAUSED
    driver.tell(got.PauseRequested())
    assert driver.phase is Phase.PAUSED
    driver.tell(got.ResumeRequested())
    assert driver.phase is Phase.PLANNING
    assert not driver.record.pause_requested


def test_stop_now_ends_the_running_step_without_an_update():
    driver = Driver()
    driver.configure()
    driver.begin()
    driver.tell(got.StopRequested(after_step=False, now_unix_ms=1))
    close = driver.last(do.CloseRun)
    assert close.epoch == driver.epoch
    driver.close()
    assert driver.record.state is RunState.STOPPED
    assert driver.record.steps_done == 0


def test_stop_after_step_lets_the_step_commit():
    driver = Driver()
    driver.configure()
    driver.begin()
    driver.tell(got.StopRequested(after_step=True, now_unix_ms=1))
    assert driver.phase is Phase.STEPPING
    driver.publish()
    driver.commit()
    driver.close()
    assert driver.record.state is RunState.STOPPED
    assert driver.record.steps_done == 1


@pytest.mark.parametrize("after_step", [False, True])
def test_stop_during_a_commit_takes_effect_after_it(after_step):
    driver = Driver()
    driver.configure()
    driver.begin()
    driver.publish()
    driver.tell(got.StopRequested(after_step=after_step, now_unix_ms=1))
    assert driver.phase is Phase.COMMITTING
    driver.commit()
    assert driver.phase is Phase.ENDING
    assert driver.record.steps_done == 1


def test_a_queued_run_is_stopped_at_once():
    driver = Driver()
    instructions = driver.tell(got.StopRequested(after_step=False, now_unix_ms=9))
    assert driver.record.state is RunState.STOPPED
    assert driver.record.ended_unix_ms == 9
    assert not driver.all(do.CloseRun)
    assert isinstance(instructions[-1], do.RunOver)


def test_a_queued_run_remembers_that_it_is_to_be_paused():
    driver = Driver()
    driver.tell(got.PauseRequested())
    assert driver.record.state is RunState.PENDING
    driver.configure()
    assert driver.phase is Phase.PAUSED


def test_a_checkpoint_is_written_between_two_steps_and_answered():
    driver = Driver()
    driver.configure()
    driver.begin()
    driver.tell(got.CheckpointRequested(request=1))
    driver.tell(got.CheckpointRequested(request=2))
    assert not driver.all(do.SaveCheckpoint)
    driver.publish()
    driver.commit()
    assert driver.phase is Phase.CHECKPOINTING
    driver.tell(got.CheckpointSaved(ticket=driver.ticket, path="/c/1", weights_version=1))
    answer = driver.last(do.AnswerCheckpoint)
    assert (answer.requests, answer.path, answer.weights_version) == ((1, 2), "/c/1", 1)
    assert driver.phase is Phase.PLANNING


def test_a_paused_run_writes_a_checkpoint_and_stays_paused():
    driver = Driver()
    driver.tell(got.PauseRequested())
    driver.configure()
    driver.tell(got.CheckpointRequested(request=1))
    assert driver.phase is Phase.CHECKPOINTING
    driver.tell(got.CheckpointSaved(ticket=driver.ticket, path="/c/0", weights_version=0))
    assert driver.phase is Phase.PAUSED


def test_a_checkpoint_that_the_learner_refuses_is_an_answer_not_a_restart():
    driver = Driver()
    driver.tell(got.PauseRequested())
    driver.configure()
    driver.tell(got.CheckpointRequested(request=1))
    driver.fail_work(retryable=False)
    assert "boom" in driver.last(do.AnswerCheckpoint).error
    assert driver.phase is Phase.PAUSED
    assert driver.record.restarts == 0


def test_checkpoints_are_due_every_so_many_steps_and_once_a_version():
    driver = Driver(steps=4, checkpoint_every_steps=2)
    driver.configure()
    driver.train_step()
    assert driver.phase is Phase.PLANNING
    driver.train_step()
    assert driver.phase is Phase.CHECKPOINTING
    driver.tell(got.CheckpointSaved(ticket=driver.ticket, path="/c/2", weights_version=2))
    assert driver.phase is Phase.PLANNING
    assert driver.record.checkpoint_version == 2


@pytest.mark.parametrize(
    "command",
    [
        got.PauseRequested(),
        got.ResumeRequested(),
        got.StopRequested(after_step=False, now_unix_ms=1),
        got.CheckpointRequested(request=1),
    ],
)
def test_an_ended_run_takes_no_commands(command):
    driver = Driver()
    driver.tell(got.StopRequested(after_step=False, now_unix_ms=1))
    with pytest.raises(FailedPrecondition, match="run-1 has stopped"):
        driver.tell(command)
    assert driver.record.stop_requested is StopRequest.NOW


def test_a_checkpoint_waiting_when_the_run_ends_gets_an_answer():
    driver = Driver()
    driver.configure()
    driver.begin()
    driver.tell(got.CheckpointRequested(request=7))
    driver.tell(got.StopRequested(after_step=False, now_unix_ms=1))
    answer = driver.last(do.AnswerCheckpoint)
    assert answer.requests == (7,)
    assert "stopped" in answer.error


def test_an_answer_with_an_old_ticket_changes_nothing():
    driver = Driver()
    driver.configure()
    old = driver.ticket
    driver.begin()
    assert driver.tell(got.EpochTaken(ticket=old, epoch=99)) == []
    assert driver.tell(got.DeadlinePassed(ticket=old)) == []
    assert driver.phase is Phase.STEPPING


def test_events_of_another_epoch_and_repeated_events_change_nothing():
    driver = Driver()
    driver.configure()
    driver.begin()
    published = bodies.WeightsPublished(weights_version=1)
    assert driver.node(published, epoch=driver.epoch - 1) == []
    assert driver.node(published, step=5) == []
    assert driver.phase is Phase.STEPPING


def test_what_leaves_between_two_steps_is_counted_in_the_later_one():
    driver = Driver()
    driver.configure()
    driver.begin()
    driver.publish()
    moved = bodies.ContentsMoved(
        storage="policy.optimizer.0", device="cpu", restored=False, size_bytes=8, seconds=0.5
    )
    late = driver.epoch
    driver.node(moved, epoch=late, step=0)
    driver.commit()
    driver.node(moved, epoch=late, step=0)
    driver.begin()
    driver.node(moved, epoch=late, step=0)
    driver.node(moved)
    driver.publish()
    metrics = [instruction.step.metrics for instruction in driver.all(do.CommitStep)]
    assert "policy_optimizer_spilled_bytes" not in metrics[0]
    assert metrics[1]["policy_optimizer_spilled_bytes"] == 4 * 8


def test_an_illegal_move_tells_the_story():
    driver = Driver()
    driver.configure()
    driver.begin()
    with pytest.raises(InvalidTransition, match="PENDING -> GATHERING"):
        driver.tell(got.Started())
