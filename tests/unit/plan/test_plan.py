"""The plans: the figures of the 32B example, lifetimes, choices, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.config.recipe import TrainingConfig
from common.errors import InvalidArgument
from common.step.schedule import Schedule
from common.tensors.parts import PARTS_IN_FLIGHT
from common.vlm.shape import read_shape
from rollplex.plan.plan import NAIVE, RESTORE_AHEAD_GROUPS, ROLLOUT_APART, plans
from rollplex.plan.request import Batch, PlanRequest
from rollplex.plan.sizes import (
    LOGITS_BYTES,
    NORM_PART_BYTES,
    OPTIMIZER_PART_MIB,
    RESERVE_BYTES,
)
from rollplex.plan.table import Phase, TensorClass
from services.broker import arena_cuda

GIB = 2**30

BATCH = Batch(prompts=32, samples=8, prompt_tokens=4096, vision_tokens=3584, response_tokens=512)
REQUEST = PlanRequest(
    shape=read_shape("qwen2.5-vl-32b"), gpu="h800", gpus=32, train_tp=8, rollout_tp=4, batch=BATCH
)
"""The example of docs/memory.md."""
SCHEDULES = [schedule.value for schedule in Schedule]


def by_name(request):
    return {plan.name: plan for plan in plans(request)}


@pytest.fixture(scope="module")
def example():
    return by_name(REQUEST)


def test_naive_colocation_needs_about_165_gib(example):
    assert example[NAIVE].table.peak / GIB == pytest.approx(165, rel=0.03)
    assert not example[NAIVE].fits


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_fits_an_h800(example, name):
    assert example[name].fits
    assert example[name].table.peak < 80 * GIB
    assert not example[name].excess


def test_naive_bytes_from_the_parameters(example):
    """The large classes once more, by hand, to 1 %."""
    table, parameters = example[NAIVE].table, 33.45e9

    def at(row):
        return table.get(row, Phase.WINDOW)

    assert at(TensorClass.POLICY) == pytest.approx(parameters * 2 / 8, rel=0.01)
    assert at(TensorClass.ROLLOUT) == pytest.approx(parameters * 2 / 4, rel=0.01)
    frozen = 33.45e9 - 0.69e9
    assert at(TensorClass.ACCUMULATOR) == pytest.approx(frozen * 4 / 8, rel=0.01)
    assert at(TensorClass.MASTERS) == pytest.approx(frozen * 4 / 32, rel=0.01)
    assert at(TensorClass.MOMENTS) == pytest.approx(frozen * 8 / 32, rel=0.01)
    kv_token = 2 * 64 * 128 * 2
    assert at(TensorClass.POOL_PREFIX) == 4 * 4096 * kv_token * 2
    assert at(TensorClass.POOL_PRIVATE) == 4 * 8 * 512 * kv_token * 2
    assert at(TensorClass.POLICY_KV) == 8 * 4095 * kv_token
    assert at(TensorClass.KV_GRADIENTS) == 4095 * kv_token * 2
    assert at(TensorClass.GRAPHS) == pytest.approx(8 * 4095 * 20.7e6 / 8, rel=0.01)


def test_naive_colocation_is_alike_in_every_phase(example):
    table = example[NAIVE].table
    assert {table.total(phase) for phase in Phase} == {table.peak}


def test_one_copy_of_the_weights_where_layouts_nest(example):
    for name in SCHEDULES:
        assert TensorClass.ROLLOUT not in example[name].table.rows()
    naive, fused = example[NAIVE].table, example["fused"].table
    wide = naive.get(TensorClass.ROLLOUT, Phase.WINDOW)
    assert fused.get(TensorClass.POLICY, Phase.WINDOW) == wide


def test_layouts_that_do_not_nest_are_rebuilt():
    tiny = replace(REQUEST.shape, heads=12, kv_heads=12, inner=1152, vocabulary=1200)
    request = replace(REQUEST, shape=tiny, gpus=12, train_tp=4, rollout_tp=6)
    made = by_name(request)
    del made["disaggregated"]
    for plan in made.values():
        assert TensorClass.ROLLOUT in plan.table.rows()


def test_lifetimes_of_rollplex(example):
    table = example["rollplex"].table

    def phases(row):
        return {phase for phase in Phase if table.get(row, phase)}

    assert phases(TensorClass.POOL_PREFIX) == {Phase.PREFILL, Phase.WINDOW}
    assert phases(TensorClass.GRAPHS) == {Phase.WINDOW, Phase.REFERENCE, Phase.TRAINING}
    assert phases(TensorClass.RESPONSES) == {Phase.TRAINING}
    assert Phase.WINDOW not in phases(TensorClass.MASTERS) | phases(TensorClass.MOMENTS)
    assert phases(TensorClass.POLICY) == set(Phase)


def test_what_each_schedule_keeps_in_the_window(example):
    def window(name, row):
        return example[name].table.get(row, Phase.WINDOW)

    assert window("serial", TensorClass.GRAPHS) == window("serial", TensorClass.POLICY_KV) == 0
    assert window("rollplex", TensorClass.RESPONSES) == 0
    assert window("fused", TensorClass.RESPONSES) > 0


def test_two_sets_of_gpus_share_nothing(example):
    training, rollout = example["disaggregated"].table, example[ROLLOUT_APART].table
    sizes = example["serial"].sizes
    assert training.get(TensorClass.POLICY, Phase.WINDOW) == sizes.weights(REQUEST.train_tp)
    assert rollout.get(TensorClass.ROLLOUT, Phase.UPDATE) == sizes.weights(REQUEST.rollout_tp)
    pools = {TensorClass.POOL_PREFIX, TensorClass.POOL_PRIVATE}
    assert pools < set(rollout.rows())
    both = set(rollout.rows()) & set(training.rows())
    assert both == {TensorClass.VISION, TensorClass.WORK, TensorClass.RESERVE}
    scored = training.get(TensorClass.REFERENCE_KV, Phase.WINDOW)
    assert scored == REQUEST.groups * sizes.prefix_kv
    assert example[ROLLOUT_APART].recipe == {}


def test_as_many_graphs_as_fit(example):
    plan = example["rollplex"]
    assert 1 < plan.graphs < REQUEST.groups
    assert not plan.inputs
    one = plan.sizes.graph(inputs=False)
    assert plan.table.peak + one > REQUEST.budget_bytes
    (larger,) = [p for p in plans(replace(REQUEST, gpu="h200")) if p.name == "rollplex"]
    assert larger.graphs == REQUEST.groups
    assert larger.restore_ahead == RESTORE_AHEAD_GROUPS


def test_the_limit_on_graphs_holds_for_all():
    made = by_name(replace(REQUEST, prefix_graphs=1))
    assert made.pop(ROLLOUT_APART).graphs == 0
    assert {plan.graphs for plan in made.values()} == {1}


def test_layer_inputs_where_no_graph_fits():
    batch = replace(BATCH, prompt_tokens=16384, vision_tokens=0)
    plan = by_name(replace(REQUEST, batch=batch))["fused"]
    assert plan.inputs
    assert plan.recipe["activation_checkpointing"] is True


def test_headroom_is_left(example):
    headroom = 6 * GIB
    made = by_name(replace(REQUEST, headroom_bytes=headroom))
    assert made["rollplex"].graphs < example["rollplex"].graphs
    assert made["rollplex"].table.peak + headroom <= 81559 * 2**20


def test_optimizer_state_that_stays():
    made = by_name(replace(REQUEST, spill_optimizer=False))["rollplex"]
    masters = {made.table.get(TensorClass.MASTERS, phase) for phase in Phase}
    assert masters == {made.sizes.masters}
    assert made.host_bytes == 0


def test_of_optimizer_state_that_is_spilled_three_parts_are_in_flight():
    request = replace(REQUEST, shard_optimizer=False)
    plan = by_name(request)["rollplex"]
    sizes, table = plan.sizes, plan.table
    count = len(sizes.optimizer_parts)
    assert count > PARTS_IN_FLIGHT
    assert plan.restore_ahead == 0
    assert any(f"3 of its {count} parts at a time" in note for note in plan.notes)
    there = {Phase.VISION, Phase.UPDATE}
    for row, whole in ((TensorClass.MASTERS, sizes.masters), (TensorClass.MOMENTS, sizes.moments)):
        found = {phase: table.get(row, phase) for phase in Phase}
        assert {phase for phase, size in found.items() if size} == there
        assert found[Phase.UPDATE] == pytest.approx(whole * PARTS_IN_FLIGHT / count, rel=0.01)
    part_bytes = sizes.masters_of(1) + sizes.moments_of(1)
    assert part_bytes * sizes.in_flight_elements <= PARTS_IN_FLIGHT * OPTIMIZER_PART_MIB * 2**20


def test_optimizer_state_that_comes_ahead_is_there_for_the_update():
    plan = by_name(replace(REQUEST, gpu="h200"))["rollplex"]
    assert plan.restore_ahead
    assert plan.table.get(TensorClass.MOMENTS, Phase.UPDATE) == plan.sizes.moments
    assert plan.table.get(TensorClass.MOMENTS, Phase.VISION) < plan.sizes.moments


@pytest.mark.parametrize(("name", "update_gib"), [("3b", 71), ("7b", 80)])
def test_one_h200_holds_the_3b_and_the_7b_shape(name, update_gib):
    """Videos of 6144 tokens; of 7B, all of the optimizer's state at once would need 153 GiB."""
    batch = Batch(
        prompts=8, samples=8, prompt_tokens=6144, vision_tokens=5376, response_tokens=1024
    )
    request = PlanRequest(
        shape=read_shape(f"qwen2.5-vl-{name}"),
        gpu="h200",
        gpus=1,
        train_tp=1,
        rollout_tp=1,
        batch=batch,
    )
    made = by_name(request)
    for schedule in SCHEDULES:
        assert made[schedule].fits, schedule
        assert made[schedule].table.total(Phase.UPDATE) < update_gib * GIB
    resident = by_name(replace(request, spill_optimizer=False))
    assert resident["serial"].fits == (name == "3b")


def test_reference_weights_that_leave(example):
    made = by_name(replace(REQUEST, spill_reference=True))
    away = {
        "serial": set(Phase) - {Phase.REFERENCE},
        "rollplex": {Phase.TRAINING, Phase.UPDATE},
        "fused": {Phase.UPDATE},
    }
    for name, phases in away.items():
        plan = made[name]
        weights = plan.sizes.weights(REQUEST.train_tp)
        found = {phase: plan.table.get(TensorClass.REFERENCE, phase) for phase in Phase}
        assert found == {phase: 0 if phase in phases else weights for phase in Phase}
        assert plan.host_bytes == example[name].host_bytes + weights
        assert plan.recipe["spill_reference"] is True
        assert plan.graphs >= example[name].graphs


def test_a_trained_tower_has_graphs_and_accumulators():
    frozen, trained = (by_name(replace(REQUEST, train_vision=on)) for on in (False, True))
    for name in (NAIVE, "rollplex"):
        assert TensorClass.VISION_GRAPHS not in frozen[name].table.rows()
        assert trained[name].table.get(TensorClass.VISION_GRAPHS, Phase.TRAINING) > 0
        assert trained[name].sizes.accumulator > frozen[name].sizes.accumulator


def test_float32_has_no_masters_and_no_fused_kernels():
    plan = by_name(replace(REQUEST, dtype="float32"))["serial"]
    assert plan.sizes.masters == 0
    assert not plan.sizes.fused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "b200"}, "gpu = 'b200': legal are a100-80, h100, h800, h200"),
        ({"train_tp": 3}, "train_tp = 3: .*40 heads.* on 32 GPUs legal are 1, 2, 4, 8"),
        ({"rollout_tp": 16}, "rollout_tp = 16: .*legal are 1, 2, 4, 8"),
        ({"dtype": "fp8"}, "dtype = 'fp8': legal are bfloat16, float32"),
        ({"gpus": 0}, "gpus = 0: must be at least 1"),
        ({"prefix_graphs": 0}, "prefix_graphs = 0: must be at least 1"),
        ({"headroom_bytes": 1 << 40}, "headroom = .*less than"),
        ({"batch": replace(BATCH, prompt_tokens=1)}, "prompt_tokens = 1: must be at least 2"),
        ({"batch": replace(BATCH, vision_tokens=4096)}, "must be from 0 to .* = 4095"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(InvalidArgument, match=message):
        plans(replace(REQUEST, **changes))


def test_constants_are_those_of_the_services():
    assert RESERVE_BYTES == arena_cuda.RESERVE_BYTES
    defaults = TrainingConfig.model_fields
    assert defaults["restore_ahead_groups"].default == RESTORE_AHEAD_GROUPS
    assert defaults["optimizer_part_mib"].default == OPTIMIZER_PART_MIB


def test_constants_are_those_of_the_update():
    from common.rl.optimizer import NORM_PART

    assert NORM_PART_BYTES == 8 * NORM_PART


def test_logits_are_those_of_the_fused_kernels():
    pytest.importorskip("triton", reason="Triton is not installed")
    from common.vlm.cuda import vocabulary

    assert LOGITS_BYTES == vocabulary.LOGITS_BYTES


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_recipe_of_a_plan_is_legal(example, name):
    TrainingConfig(steps=1, prompts_per_step=32, **example[name].recipe)
