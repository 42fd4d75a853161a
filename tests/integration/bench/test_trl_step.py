"""TRL's step, rehearsed on a CPU where TRL is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from bench import trl_step
from bench.step_inputs import make_model, write_rows
from bench.step_workloads import workload
from tests.unit.structure.source import ROOT

needs_trl = pytest.mark.skipif(
    any(find_spec(name) is None for name in trl_step._NEEDED), reason="TRL is not installed"
)


def test_without_trl_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit, match=r"needs trl.*pip install trl==1\.16\.0"):
        trl_step.main(["--scale", "tiny"])


@pytest.mark.parametrize(("asked", "found"), [(None, 8), (16, 16)])
def test_micro_batches_divide_the_responses(asked: int | None, found: int) -> None:
    assert trl_step._micro_batch(asked, 64) == found


def test_another_micro_batch_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"--micro-batch 5: .* 12 responses"):
        trl_step._micro_batch(5, 12)


@needs_trl
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_step_has_its_phases() -> None:
    command = [sys.executable, "-m", "bench.trl_step", "--scale=tiny", "--warmup=1", "--steps=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["steps"], len(found["warm_up_step_s"])) == (2, 1)
    assert (found["prompt_tokens"], found["response_tokens"]) == (3 * 64, 3 * 4 * 12)
    parts = ("generation_s", "reference_s", "input_s", "training_s")
    for number, step_s in enumerate(found["step_s"]):
        assert all(found[part][number] > 0 for part in parts)
        assert sum(found[part][number] for part in parts) == pytest.approx(step_s)


@needs_trl
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
def test_a_step_trains_the_whole_model_and_leaves_the_reference(tmp_path) -> None:
    from bench.trl_trainer import RandomCheckpoint, StepClock, make_trainer

    work = workload("T", scale="tiny")
    model = make_model(work, tmp_path / "model")
    trainer = make_trainer(
        work,
        StepClock(torch.device("cpu"), warm_up=0),
        model=model,
        rows=write_rows(work, model, tmp_path / "rows", rows=work.prompts),
        device="cpu",
        steps=1,
        micro_batch=4,
        output=tmp_path / "trainer",
    )
    trainer.train()
    checkpoint = RandomCheckpoint(torch.device("cpu"), train_vision=True)
    first = checkpoint.from_pretrained(
        str(model), dtype=torch.float32, attn_implementation="sdpa"
    ).state_dict()
    reference = trainer.ref_model.state_dict()
    policy = trainer.model.state_dict()
    assert all(torch.equal(reference[name], first[name]) for name in first)
    same = [name for name in first if torch.equal(policy[name], first[name])]
    assert same == []
