"""The run machine: deaths, failed tasks, lost brokers, deadlines, restarts of the controller."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import ErrorCode
from common.events import bodies
from common.ids import Participant, Service
from common.step.place import Place
from services.controller import instructions as do
from services.controller import messages as got
from services.controller.config import FailurePolicy
from services.controller.phase import Phase
from services.controller.record import History, RunState
from tests.unit.controller.kit import INCARNATIONS, RECORD, Driver


def _stepping(**settings) -> Driver:
    driver = Driver(**settings)
    driver.configure()
    driver.begin()
    return driver


def _fail_task(driver: Driver, *, code="internal", retryable=True) -> None:
    driver.node(
        bodies.TaskFailed(
            task="reward", code=code, type="RewardFailed", message="bad", retryable=retryable
        )
    )


def _deadline(driver: Driver) -> None:
    driver.tell(got.DeadlinePassed(ticket=driver.ticket))


@pytest.mark.parametrize(
    ("fail", "cause"),
    [
        (lambda d: d.die(), "learner/0 died: connection closed"),
        (_fail_task, "reward failed in broker/0: RewardFailed: bad"),
        (lambda d: d.tell(got.BrokerLost(reason="hub restarted")), "hub restarted"),
        (_deadline, "took over 60 s"),
        (lambda d: d.node(bodies.StepAborted(reason="fence")), "ended by the broker: fence"),
    ],
)
def test_a_failed_epoch_is_begun_again_with_the_same_prompts(fail, cause):
    driver = _stepping()
    first = driver.last(do.BeginStep).plan
    fail(driver)
    abort = driver.last(do.AbortStep)
    assert (abort.epoch, abort.step) == (first.epoch, 0)
    assert cause in abort.reason
    assert driver.record.state is RunState.CONFIGURING
    driver.abandon()
    driver.configure()
    driver.begin()
    again = driver.last(do.BeginStep).plan
    assert again.epoch > first.epoch
    assert replace(again, epoch=first.epoch) == first
    assert driver.record.restarts == 1
    assert driver.last(do.ConfigureWorkers).previous_epoch == first.epoch


def test_without_a_broker_the_abort_does_not_call_it():
    driver = _stepping()
    driver.tell(got.BrokerLost(reason="gone"))
    assert driver.last(do.AbortStep).broker_alive is False
    driver.abandon()
    driver.configure()
    driver.begin()
    driver.die()
    assert driver.last(do.AbortStep).broker_alive is True


def test_attempts_wait_longer_and_longer_and_end():
    policy = FailurePolicy(max_restarts_in_a_row=3, backoff_s=0.1)
    driver = Driver(policy=policy)
    for _ in range(3):
        driver.configure()
        driver.begin()
        driver.die()
        driver.abandon()
    delays = [i.delay_s for i in driver.all(do.GatherServices)]
    assert delays == pytest.approx([0.0, 0.1, 0.2, 0.4])
    driver.configure()
    driver.begin()
    driver.die()
    driver.close()
    assert driver.record.state is RunState.FAILED
    assert "no step was committed in 4 attempts" in driver.record.reason
    assert "learner/0 died" in driver.record.reason


def test_a_committed_step_gives_all_attempts_back():
    driver = Driver(policy=FailurePolicy(max_restarts_in_a_row=1), steps=4)
    for done in range(3):
        driver.configure(done)
        driver.train_step()
        driver.fail_work()
        assert driver.phase is Phase.GATHERING
    assert driver.record.restarts == 3


def test_an_error_that_every_attempt_will_give_fails_the_run_at_once():
    driver = _stepping()
    _fail_task(driver, code="invalid_argument", retryable=False)
    driver.close()
    assert driver.record.state is RunState.FAILED
    assert "RewardFailed: bad" in driver.record.reason
    assert driver.record.restarts == 0


def test_a_worker_that_refuses_the_recipe_fails_the_run_at_once():
    driver = Driver()
    driver.to_configuring()
    driver.fail_work(code=ErrorCode.INVALID_ARGUMENT, retryable=False)
    driver.close()
    assert driver.record.state is RunState.FAILED


def test_a_death_while_configuring_counts_if_that_process_was_configured():
    driver = Driver()
    driver.to_configuring()
    driver.die(Service.ROLLOUT)
    assert driver.phase is Phase.CONFIGURING
    driver.machine.validate()
    driver.tell(
        got.WorkersConfigured(ticket=driver.ticket, weights_version=0, incarnations=INCARNATIONS)
    )
    assert driver.phase is Phase.GATHERING


def test_the_late_news_of_a_replaced_process_is_no_death():
    driver = Driver()
    driver.to_configuring()
    driver.die(Service.ROLLOUT, incarnation="rollout-before")
    driver.tell(
        got.WorkersConfigured(ticket=driver.ticket, weights_version=0, incarnations=INCARNATIONS)
    )
    assert driver.phase is Phase.PLANNING
    driver.die(Service.ROLLOUT, incarnation="rollout-before")
    assert driver.phase is Phase.PLANNING
    # After StepBegan the order itself says that it is news.
    driver.begin()
    driver.die(Service.ROLLOUT, incarnation="rollout-unknown")
    assert driver.phase is Phase.ABORTING


def test_a_death_of_something_that_takes_no_part_is_ignored():
    driver = _stepping()
    driver.node(
        bodies.ParticipantDied(
            participant=Participant(service=Service.CONTROLLER),
            pid=1,
            incarnation="x",
            reason="",
        )
    )
    assert driver.phase is Phase.STEPPING


def test_a_death_during_a_commit_is_dealt_with_after_it():
    driver = _stepping()
    driver.publish()
    driver.die()
    assert driver.phase is Phase.COMMITTING
    driver.commit()
    assert driver.phase is Phase.GATHERING
    assert driver.record.steps_done == 1


def test_a_death_during_a_pause_reconfigures_and_pauses_again():
    driver = Driver()
    driver.tell(got.PauseRequested())
    driver.configure()
    driver.die()
    assert driver.phase is Phase.GATHERING
    driver.configure()
    assert driver.phase is Phase.PAUSED


def test_a_checkpoint_cut_off_by_a_death_is_written_after_the_restart():
    driver = _stepping()
    driver.tell(got.CheckpointRequested(request=1))
    driver.publish()
    driver.commit()
    driver.die()
    driver.configure(1)
    assert driver.phase is Phase.CHECKPOINTING
    assert not driver.all(do.AnswerCheckpoint)


def test_ranks_that_a_failed_checkpoint_has_parted_are_configured_anew():
    """The client has its answer by then, and no attempt is counted against the run."""
    driver = Driver(place=Place(replicas=2), policy=FailurePolicy(max_restarts_in_a_row=0))
    driver.tell(got.PauseRequested())
    driver.configure()
    before = driver.epoch
    driver.tell(got.CheckpointRequested(request=1))
    driver.fail_work(retryable=False)
    assert "boom" in driver.last(do.AnswerCheckpoint).error
    assert driver.phase is Phase.GATHERING
    driver.configure()
    assert driver.phase is Phase.PAUSED
    assert driver.last(do.ConfigureWorkers).epoch == driver.epoch > before
    assert len(driver.all(do.SaveCheckpoint)) == 1


def test_services_that_stay_away_fail_the_run_and_are_named():
    driver = Driver(policy=FailurePolicy(services_deadline_s=7))
    driver.tell(got.Started())
    assert driver.last(do.ArmDeadline).seconds == 7
    driver.tell(
        got.ServicesMissing(ticket=driver.ticket, waiting_for=("learner/0 is not registered",))
    )
    _deadline(driver)
    driver.close()
    assert "after 7 s" in driver.record.reason
    assert "learner/0 is not registered" in driver.record.reason


def test_while_redis_is_away_the_wait_for_services_does_not_end():
    driver = Driver()
    driver.tell(got.Started())
    driver.tell(got.ServicesMissing(ticket=driver.ticket, registry_away=True))
    _deadline(driver)
    assert driver.phase is Phase.GATHERING


def test_stop_during_recovery_ends_the_run():
    driver = _stepping()
    driver.die()
    driver.tell(got.StopRequested(after_step=False, now_unix_ms=1))
    driver.close()
    assert driver.record.state is RunState.STOPPED


@pytest.mark.parametrize(("dropped", "fails"), [(3, False), (4, True)])
def test_the_run_fails_when_too_large_a_share_of_its_samples_is_dropped(dropped, fails):
    # 3 steps of 2 prompts; half of 6 may be dropped.
    driver = Driver()
    driver.configure()
    left = dropped
    while left and driver.phase is Phase.PLANNING:
        driver.begin()
        for group in range(min(left, 2)):
            driver.drop(group)
            left -= 1
        if driver.phase is Phase.STEPPING:
            driver.publish()
            driver.commit()
    assert (driver.phase is Phase.ENDING) is fails
    if fails:
        driver.close()
        assert "4 samples were dropped" in driver.record.reason
        assert "max_drop_fraction = 0.5 of the run's 6" in driver.record.reason
        assert "a.png" in driver.record.reason
    else:
        assert driver.record.samples_dropped == dropped


def test_drops_of_a_failed_epoch_are_counted_once():
    driver = _stepping()
    driver.drop(0)
    driver.die()
    driver.abandon()
    driver.configure()
    driver.begin()
    driver.drop(0)
    driver.publish()
    assert driver.record.samples_dropped == 1


# ---------------------------------------------------------------- the controller's own restart


def _resumed(version: int, *, steps_done: int = 1, **changes) -> Driver:
    record = replace(
        RECORD,
        state=RunState.RUNNING,
        steps_done=steps_done,
        first_version=0,
        epoch=7,
        steps_total=5,
        **changes,
    )
    driver = Driver(record=record, steps=5)
    driver.configure(version)
    return driver


def test_a_restarted_controller_fences_the_old_epoch_and_goes_on():
    driver = _resumed(1)
    assert driver.last(do.ConfigureWorkers).previous_epoch == 7
    assert driver.last(do.ConfigureWorkers).epoch == 8
    driver.begin()
    assert driver.last(do.BeginStep).plan.step == 1


def test_a_durable_update_without_a_record_is_committed_not_run_again():
    driver = _resumed(2)
    adopt = driver.last(do.AdoptSteps)
    assert (adopt.first_step, adopt.version, adopt.epoch) == (1, 2, 8)
    driver.tell(got.StepsAdopted(ticket=driver.ticket, metrics={"loss": 0.1}))
    assert driver.record.steps_done == 2
    assert driver.record.latest == {"loss": 0.1}
    driver.begin()
    assert driver.last(do.BeginStep).plan.step == 2


def test_steps_that_the_durable_state_does_not_hold_are_run_again():
    driver = _resumed(1, steps_done=3)
    assert driver.last(do.RewindRun).version == 1
    assert driver.record.steps_done == 1
    assert "steps 1 to 2 are run again" in driver.last(do.Note).text
    driver.begin()
    assert driver.last(do.BeginStep).plan.step == 1


def test_a_run_that_resumes_from_a_checkpoint_begins_there():
    driver = Driver(record=replace(RECORD, resume_from="/c/2"))
    driver.configure(2)
    assert driver.record.first_version == 2
    assert not driver.all(do.AdoptSteps)
    driver.begin()
    assert driver.last(do.BeginStep).plan.step == 2


def test_evaluations_that_are_committed_are_not_repeated_after_a_restart():
    record = replace(RECORD, state=RunState.RUNNING, first_version=0, epoch=3)
    driver = Driver(record=record, eval_rows=2, history=History(evaluated={0: 0.5}))
    driver.configure(0)
    driver.begin()
    assert driver.last(do.BeginStep).plan.mode == "train"


def test_a_pause_survives_the_controller():
    driver = _resumed(1, pause_requested=True)
    assert driver.phase is Phase.PAUSED
