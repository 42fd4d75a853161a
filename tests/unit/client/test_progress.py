"""Progress in plain lines and as a live display."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from common.step.plan import StepMode
from rollplex.cli.progress import Pace, open_progress
from rollplex.models import Run, RunState, RunUpdate, ServicePhase, StepRecord

RUN = Run(
    run_id="r",
    state=RunState.RUNNING,
    reason="",
    recipe_json="{}",
    run_dir="",
    steps_done=1,
    steps_total=4,
    epoch=2,
    restarts=0,
    created=datetime(2026, 1, 1, tzinfo=UTC),
    ended=None,
)
STEP = StepRecord(
    step=0,
    epoch=2,
    mode=StepMode.TRAIN,
    weights_version=1,
    wall=timedelta(seconds=0.5),
    metrics={"reward_mean": 0.25, "tokens_per_s": 812.4, "prefix_overlap_fraction": 0.9},
)
PHASES = (ServicePhase(participant="rollout/0", phase="decode", group=3, serving=True),)


def test_lines_have_one_line_a_step_note_and_state(capsys):
    with open_progress(RUN, live=False) as progress:
        progress.show(RunUpdate(run=RUN, step=None, phases=(), note=""))
        progress.show(RunUpdate(run=RUN, step=STEP, phases=PHASES, note=""))
        progress.show(RunUpdate(run=RUN, step=None, phases=PHASES, note="begins again: x"))
        evaluated = replace(STEP, mode=StepMode.EVAL)
        ended = replace(RUN, state=RunState.FAILED, reason="no luck")
        progress.show(RunUpdate(run=ended, step=evaluated, phases=(), note=""))
    assert capsys.readouterr().out.splitlines() == [
        "running",
        "step 1/4  reward 0.25  tokens/s 812.4  0.50 s  overlap 90%",
        "note: begins again: x",
        "evaluation of version 1: held-out reward 0.25",
        "failed: no luck",
    ]


def test_the_live_display_shows_step_phases_and_notes(capsys):
    with open_progress(RUN, live=True) as progress:
        progress.show(RunUpdate(run=RUN, step=STEP, phases=PHASES, note="begins again: x"))
    text = capsys.readouterr().out
    for part in ("step 1/4", "reward 0.25", "rollout/0", "decode", "group 3", "begins again: x"):
        assert part in text


@pytest.mark.parametrize("seen", [[], [1], [1, 1]])
def test_the_time_left_is_unknown_until_steps_were_seen(seen):
    pace = Pace()
    for steps in seen:
        pace.note(steps)
    assert pace.left(RUN) is None


def test_the_time_left_goes_down_to_nothing():
    pace = Pace()
    pace.note(1)
    pace.note(4)
    assert pace.left(replace(RUN, steps_done=4)) == timedelta(0)
