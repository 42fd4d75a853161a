"""Summary and pictures from a run's files."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta

import pytest
from PIL import Image

from rollplex.models import Run, RunState
from rollplex.report.run_files import read_steps, read_timeline
from rollplex.report.summary import summarise, write_report

pytestmark = pytest.mark.usefixtures("drawing_fonts")


def _step(step, epoch, *, mode="train", reward=0.5, wall=1.0, **metrics):
    return {
        "step": step,
        "epoch": epoch,
        "mode": mode,
        "weights_version": step + (mode == "train"),
        "wall_s": wall,
        "metrics": {"reward_mean": reward} | metrics,
    }


def _span(task, start_s, end_s, *, epoch=3, participant="rollout/0"):
    return {
        "run": "r",
        "step": 0,
        "epoch": epoch,
        "mode": "train",
        "group": None,
        "task": task,
        "participant": participant,
        "start_ns": int(start_s * 1e9),
        "end_ns": int(end_s * 1e9),
    }


@pytest.fixture
def run(tmp_path):
    steps = [
        _step(0, 2, mode="eval", reward=0.1),
        _step(0, 3, wall=2.0, prefix_overlap_fraction=0.5, update_order_margin_s=0.2),
        _step(1, 4, wall=9.0),
        _step(1, 5, wall=4.0, prefix_overlap_fraction=1.0, update_order_margin_s=0.1),
        _step(2, 6, wall=0.0, adopted=1.0),
        _step(3, 7, mode="eval", reward=0.9),
    ]
    lines = [json.dumps(step) for step in steps]
    (tmp_path / "steps.jsonl").write_text("\n".join(lines) + '\n{"step": 2, "ep')
    spans = [
        _span("window", 1, 3),
        _span("decode", 1, 3),
        _span("policy_prefix", 1.5, 2, participant="prefix-encoder/0"),
        _span("update", 4, 5, epoch=5, participant="learner/0"),
    ]
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(s) + "\n" for s in spans))
    began = datetime(2026, 1, 1, tzinfo=UTC)
    return Run(
        run_id="r",
        state=RunState.SUCCEEDED,
        reason="",
        recipe_json='{"training": {"schedule": "fused"}}',
        run_dir=str(tmp_path),
        steps_done=3,
        steps_total=3,
        epoch=6,
        restarts=1,
        created=began,
        ended=began + timedelta(seconds=30),
        eval_reward_before=0.1,
        eval_reward_after=0.9,
    )


def test_the_later_record_of_a_step_counts_and_half_a_line_does_not(run, tmp_path):
    assert [(s.step, s.mode.value, s.epoch) for s in read_steps(tmp_path)] == [
        (0, "eval", 2),
        (0, "train", 3),
        (1, "train", 5),
        (2, "train", 6),
        (3, "eval", 7),
    ]


def test_the_summary(run):
    summary = summarise(run)
    assert summary["schedule"] == "fused"
    assert summary["wall_s"] == 30
    assert summary["step_times_s"] == [2.0, 4.0]
    assert summary["prefix_overlap_fraction"] == 0.75
    assert summary["update_order_margin_s"] == 0.1
    assert (summary["eval_reward_before"], summary["eval_reward_after"]) == (0.1, 0.9)
    assert summary["tokens_per_s"] is None


def test_the_report_is_written_into_the_folder(run, tmp_path):
    written = write_report(run, summarise(run))
    assert [path.name for path in written] == ["summary.json", "learning_curve.png", "timeline.png"]
    assert json.loads(written[0].read_text())["restarts"] == 1
    for picture in written[1:]:
        with Image.open(picture) as image:
            assert image.width > 400
            assert len(image.convert("RGB").getcolors(2**24)) > 10


def test_a_folder_on_another_machine_gets_no_report(run):
    elsewhere = dataclasses.replace(run, run_dir="/no/such/folder")
    assert write_report(elsewhere, summarise(elsewhere)) == []


def test_a_run_without_steps_has_a_summary_only(run, tmp_path):
    (tmp_path / "steps.jsonl").unlink()
    (tmp_path / "timeline.jsonl").unlink()
    assert [path.name for path in write_report(run, summarise(run))] == ["summary.json"]
    assert read_timeline(tmp_path) == []
