"""In words and figures: how each class's bytes come about, and what was taken for granted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.step.schedule import Schedule
from common.tensors.parts import PARTS_IN_FLIGHT
from common.vlm.shape import QWEN3, vision_ranks
from rollplex.plan.plan import NAIVE, ROLLOUT_APART, gib
from rollplex.plan.sizes import OPTIMIZER_PART_MIB, RESERVE_BYTES
from rollplex.plan.table import TensorClass
from rollplex.plan.weights import parameter_count, rank_elements

if TYPE_CHECKING:
    from rollplex.plan.plan import Plan
    from rollplex.plan.request import PlanRequest
    from rollplex.plan.sizes import Sizes

_PADDED = "copies of queries, keys and values, extended to a multiple of 256 tokens"


def reasons(plan: Plan) -> dict[TensorClass, str]:
    """One sentence for every class of the plan's table."""
    texts = {**_weights(plan), **_prefixes(plan), **_rest(plan)}
    return {row: texts[row] for row in plan.table.rows()}


def _weights(plan: Plan) -> dict[TensorClass, str]:
    sizes, request = plan.sizes, plan.sizes.request
    train, rollout = request.train_tp, request.rollout_tp
    alone = (NAIVE, Schedule.DISAGGREGATED, ROLLOUT_APART)
    shared = plan.name not in alone and request.layouts_nest
    ranks = min(train, rollout) if shared else train
    held = rank_elements(request.shape, ranks)
    use = f"one storage for training TP {train} and rollout TP {rollout}: " if shared else ""
    divided = f" over {request.replicas} replicas" if request.shard_optimizer else ""
    part = f"{sizes.optimizer_elements:,} parameters{divided}"
    stay = _leaving(sizes) if plan.name != NAIVE and request.spill_optimizer else ""
    size = sizes.accumulator_itemsize
    return {
        TensorClass.POLICY: f"{use}{held:,} parameters of a rank of TP {ranks} x "
        f"{sizes.itemsize} bytes",
        TensorClass.ROLLOUT: f"{rank_elements(request.shape, rollout):,} parameters of a rank of "
        f"TP {rollout} x {sizes.itemsize} bytes, beside training's",
        TensorClass.REFERENCE: f"{rank_elements(request.shape, train):,} parameters of a rank of "
        f"TP {train} x {sizes.itemsize} bytes",
        TensorClass.ACCUMULATOR: f"{sizes.trainable:,} trainable parameters of a rank x {size} "
        "bytes",
        TensorClass.MASTERS: f"{part} x {size} bytes{stay}",
        TensorClass.MOMENTS: f"{part} x 2 x {size} bytes{stay}",
    }


def _leaving(sizes: Sizes) -> str:
    return (
        f"; on the host while not needed, and of {sizes.in_flight_elements:,} parameters at a time "
        "while parts of it leave or come back"
    )


def _prefixes(plan: Plan) -> dict[TensorClass, str]:
    sizes, request = plan.sizes, plan.sizes.request
    batch, one = request.batch, sizes.kv(1, request.train_tp)
    decoding, slot = request.decoding_groups, sizes.kv(1, request.rollout_tp)
    graph = sizes.graph(inputs=plan.inputs)
    saved = sizes.kept.prefix_inputs() if plan.inputs else sizes.kept.prefix()
    kernels = "fused kernels" if sizes.fused else "the library's modules"
    what = "layer inputs, keys and values" if plan.inputs else f"what {kernels} save"
    vision = sizes.vision_graph(inputs=plan.inputs or plan.name != NAIVE)
    return {
        TensorClass.POOL_PREFIX: f"{decoding} groups x {batch.prompt_tokens} tokens x {slot:,} "
        "bytes: 2 x layers x key/value heads of a rollout rank x head width x element",
        TensorClass.POOL_PRIVATE: f"{decoding} groups x {batch.samples} responses x "
        f"{batch.response_tokens} tokens x {slot:,} bytes",
        TensorClass.POLICY_KV: f"up to {request.groups} groups x {batch.prefix_tokens} tokens x "
        f"{one:,} bytes, copies for training",
        TensorClass.REFERENCE_KV: f"{request.groups} groups x {batch.prefix_tokens} tokens x "
        f"{one:,} bytes, of this step; where made ahead, as much again for the next",
        TensorClass.KV_GRADIENTS: f"one group x {batch.prefix_tokens} tokens x "
        f"{sizes.kv(1, request.train_tp, sizes.accumulator_itemsize):,} bytes",
        TensorClass.GRAPHS: f"{plan.graphs} kept{_again(plan)}, x {gib(graph)} GiB: "
        f"{batch.prefix_tokens} tokens x {sum(saved.values()):,.0f} bytes, {what}"
        + (
            "" if plan.inputs or not sizes.kept.padding(batch.prefix_tokens) else f", and {_PADDED}"
        ),
        TensorClass.VISION_GRAPHS: f"{request.groups} groups x {sizes.patches:,} patches, "
        f"{gib(vision)} GiB each",
    }


def _again(plan: Plan) -> str:
    late = plan.name == Schedule.FUSED and plan.graphs < plan.sizes.request.groups
    return ", and one that runs again while they wait" if late else ""


def _rest(plan: Plan) -> dict[TensorClass, str]:
    sizes, request = plan.sizes, plan.sizes.request
    batch = request.batch
    saved = sum(sizes.kept.response().values())
    logits = (
        "at most 256 MiB at once a process, and the float32 gradient of the hidden states"
        if sizes.fused
        else f"{batch.row_tokens} tokens x vocabulary of a rank: compute dtype, float32, gradient; "
        "without the gradient for the reference"
    )
    return {
        TensorClass.RESPONSES: f"one group's row of {batch.samples} x {batch.response_tokens} "
        f"tokens x {saved:,.0f} bytes",
        TensorClass.VISION: f"{request.groups} groups x ({sizes.patches:,} patches x "
        f"{request.shape.vision.patch_elements} values, and {batch.vision_tokens} embeddings x "
        f"{request.shape.vision.out_width}) x {sizes.itemsize} bytes, those of the next step in "
        "the window",
        TensorClass.LOGITS: logits,
        TensorClass.WORK: "largest layer's tensors of each service at work: forward 4 h + "
        f"{3 if sizes.fused else 4} i, backward 4 h + 4 i elements a token; decode logits; the "
        "update's float64 part and gathered shard",
        TensorClass.RESERVE: f"{gib(RESERVE_BYTES)} GiB for all processes of the GPU, what the "
        "broker leaves out of its budget",
    }


def assumptions(request: PlanRequest, sizes: Sizes) -> list[str]:
    """Everything that the figures rest on beside the options."""
    shape, train = request.shape, request.train_tp
    tower = vision_ranks(shape.vision, train)
    listed = [
        f"{shape.name}: {parameter_count(shape):,} parameters",
        f"GPUs: {request.gpus}; training replicas: {request.replicas} of TP {train}; engines: "
        f"{request.rollout_replicas} of TP {request.rollout_tp}; prefixes and reference "
        "run in training's layout",
        f"each replica has {request.groups} of {request.batch.prompts} groups, each engine decodes "
        f"{request.decoding_groups} at a time; all groups and responses have the largest length",
        "a group's responses share one copy of the prefix K/V, in naive colocation too",
        "naive colocation keeps the graphs of "
        f"{min(request.groups, request.prefix_graphs or request.groups)} prefixes, from plain "
        "modules, and one copy of the policy for training and one for the rollout",
        f"masters and moments are {request.optimizer_dtype}, "
        + ("split over the replicas" if request.shard_optimizer else "whole in every replica")
        + "; the accumulator is whole in every replica",
        f"spilled optimizer state is in parts of about {OPTIMIZER_PART_MIB:g} MiB, of which "
        f"{PARTS_IN_FLIGHT} are on the GPU at a time in an update: one leaves, one is updated, one "
        "comes; where there is room for all, they come ahead and stay until they are updated",
        "tensors of the model's width between products are "
        + ("split over the ranks (sequence parallel)" if request.sequence_parallel else "whole"),
        f"the vision tower is {'trained' if request.train_vision else 'frozen'} and split over "
        f"{tower} ranks" + ("" if tower == train else ": its heads or inner width do not divide"),
        "reference weights and the gradient accumulator never leave the GPU",
        f"{Schedule.DISAGGREGATED} has these GPUs for training, and as many others for the rollout",
        "what allocators keep between and behind tensors is not counted beyond the reserve: "
        f"{gib(request.headroom_bytes)} GiB of headroom are left for it",
        f"{'fused kernels' if sizes.fused else 'plain modules'} under the schedules",
    ]
    if max(train, request.rollout_tp) > 1:
        listed.append(
            "on GPUs the services run one rank a model: larger TP degrees are planned only"
        )
    if shape.model_type == QWEN3:
        listed.append("the services run Qwen2.5-VL only: this model is planned only")
    if request.layouts_nest:
        listed.append(
            "ranks are placed so that the narrower shard of a GPU lies inside the wider one"
        )
    if request.ahead:
        listed.append(
            "under rollplex and fused all reference prefixes of the next step are made in the "
            "window"
        )
    return listed
