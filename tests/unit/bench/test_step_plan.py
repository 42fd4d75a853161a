"""What is planned beside a measured run, and the shapes that are measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench.step_inputs import PER_RESPONSE, RESIDENT
from bench.step_plan import Planned, StepPlan
from bench.step_workloads import MODELS, most_group_tokens, workload
from common.config.loading import load_config
from common.vlm.initialise import ModelSpec
from common.vlm.published import PUBLISHED
from rollplex.cli.__main__ import main
from rollplex.plan.sizes import RESERVE_BYTES

GIB = 1 << 30


@pytest.fixture(params=["3b"])
def plan(tmp_path, request):
    """Of A2 on a shape that a folder holds as a run's does."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[f"qwen2.5-vl-{request.param}"]))
    work = workload("A2", scale="full", model=request.param)
    return StepPlan(work=work, model=tmp_path, device="cuda", gpu="h200")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_measured_shape_is_the_published_one(name: str) -> None:
    spec = load_config(ModelSpec, MODELS[name])
    published = PUBLISHED[f"qwen2.5-vl-{name}"]
    text, vision = published["text_config"], published["vision_config"]
    assert {
        "hidden_size": spec.text.hidden,
        "intermediate_size": spec.text.intermediate,
        "num_hidden_layers": spec.text.layers,
        "num_attention_heads": spec.text.heads,
        "num_key_value_heads": spec.text.kv_heads,
        "vocab_size": spec.tokenizer.fill_to_tokens,
    } == text
    assert published["tie_word_embeddings"] == spec.text.tied_embeddings
    assert (
        vision
        | {
            "depth": spec.vision.depth,
            "hidden_size": spec.vision.hidden,
            "intermediate_size": spec.vision.intermediate,
            "num_heads": spec.vision.heads,
            "patch_size": spec.vision.patch,
            "spatial_merge_size": spec.vision.merge,
            "temporal_patch_size": spec.vision.temporal_patch,
        }
        == vision
    )


def test_the_model_is_chosen_at_full_scale() -> None:
    seven, three = (workload("A2", scale="full", model=model) for model in ("7b", "3b"))
    assert seven.model != three.model
    assert replace(seven, model=three.model) == three
    assert workload("A2", scale="tiny", model="7b") == workload("A2", scale="tiny")


@pytest.mark.parametrize("plan", sorted(MODELS), indirect=True)
@pytest.mark.parametrize("schedule", ["serial", "rollplex", "fused"])
def test_it_is_what_the_command_says(plan, schedule: str, capsys) -> None:
    arguments = (
        f"plan --model {plan.model} --gpu h200 --prompts 8 --samples 8 --prompt-tokens 6144 "
        "--vision-tokens 6080 --response-tokens 512 --json"
    )
    main(arguments.split())
    plans = json.loads(capsys.readouterr().out)["plans"]
    said = next(one for one in plans if one["name"] == schedule)
    found = plan.of(schedule)
    assert (found.peak_bytes, found.graphs) == (said["peak_bytes"], said["prefix_graphs"])
    assert found.fits
    assert said["fits"]


def test_a_smaller_budget_keeps_fewer_graphs(plan) -> None:
    whole = plan.of("rollplex")
    part = replace(plan, budget_gib=110.0).of("rollplex")
    none = replace(plan, budget_gib=40.0).of("rollplex")
    assert whole.fits
    assert part.fits
    assert part.graphs < whole.graphs
    assert part.peak_bytes <= 110 * GIB
    assert not none.fits
    assert none.peak_bytes > 40 * GIB


def test_every_graph_is_kept_whether_it_fits_or_not(plan) -> None:
    resident = replace(plan, budget_gib=80.0, graphs="all", spill_optimizer=False)
    found = resident.of("rollplex")
    assert (found.graphs, found.fits) == (8, False)
    assert found.peak_bytes > replace(plan, budget_gib=80.0).of("rollplex").peak_bytes
    assert resident.of("serial").graphs == 1


def test_a_cpu_has_no_contexts(plan) -> None:
    cpu = replace(plan, device="cpu", budget_gib=102.0)
    gpu = replace(plan, budget_gib=110.0)
    assert cpu.of("rollplex").peak_bytes == gpu.of("rollplex").peak_bytes - RESERVE_BYTES


def test_the_ratio_is_of_the_measured_peak() -> None:
    planned = Planned(peak_bytes=40 * GIB, graphs=2, fits=True)
    assert planned.figures(50.0) == {
        "planned_peak_gib": 40.0,
        "peak_over_planned": 1.25,
        "planned_graphs": 2,
    }
    assert planned.figures(None)["peak_over_planned"] is None


def test_a_prefix_pass_a_response_is_not_planned(plan) -> None:
    assert plan.of(PER_RESPONSE) is None


def test_shorter_responses_take_less_but_for_the_rollouts_room(plan) -> None:
    longest = plan.work.samples * plan.work.lengths.max_tokens
    whole, equal, shorter = (
        replace(plan, group_tokens=tokens).of("serial").peak_bytes
        for tokens in (None, longest, longest // 2)
    )
    assert shorter < whole == equal
    batch = replace(plan, group_tokens=longest // 2)._request().batch
    assert (batch.row_tokens, batch.lane_tokens) == (longest // 2, longest)


def test_the_group_with_most_tokens_is_of_these_steps() -> None:
    work = workload("A2", scale="full")
    each = [most_group_tokens(work, seed=11, steps=[step]) for step in range(3)]
    assert most_group_tokens(work, seed=11, steps=range(3)) == max(each)
    assert len(set(each)) > 1
    assert max(each) < work.samples * work.lengths.max_tokens
    fixed = workload("B", scale="full")
    assert most_group_tokens(fixed, seed=11, steps=[0]) == 8 * 128


def test_no_layer_runs_again_where_the_run_does_not(plan) -> None:
    """A budget in which `rollplex plan` falls back to layer inputs."""
    tight = replace(plan, budget_gib=60.0)
    plain = tight.of("rollplex")
    again = replace(tight, checkpointing=True).of("rollplex")
    assert (plain.fits, again.fits) == (False, True)
    assert plain.peak_bytes > again.peak_bytes


def test_reference_weights_leave_a_budget_without_room_for_them(plan) -> None:
    for budget_gib, leave in ((None, False), (80.0, False), (45.0, True)):
        request = replace(plan, budget_gib=budget_gib)._request()
        assert request.spill_reference is leave, budget_gib
    resident = replace(plan, budget_gib=45.0, spill_optimizer=False)
    assert not resident._request().spill_reference
    assert not replace(plan, budget_gib=45.0, device="cpu")._request().spill_reference


def test_a_resident_serial_is_planned_with_nothing_spilled(plan) -> None:
    assert plan.of(RESIDENT) == replace(plan, spill_optimizer=False).of("serial")
