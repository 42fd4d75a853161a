"""`rollplex plan`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import InvalidArgument
from rollplex.cli.options import FAILED, print_json

if TYPE_CHECKING:
    from rollplex.plan.request import PlanRequest

Model = Annotated[
    str, typer.Option(help="Folder with config.json, or a name such as qwen2.5-vl-32b.")
]
Gpus = Annotated[int, typer.Option(help="GPUs of the whole run.")]
Gpu = Annotated[str, typer.Option(help="a100-80, h100, h800 or h200.")]
TrainTp = Annotated[
    int | None,
    typer.Option(help="Tensor-parallel degree of training. Default: the largest up to 8."),
]
RolloutTp = Annotated[
    int | None, typer.Option(help="The same of the rollout. Default: the largest up to 4.")
]
Prompts = Annotated[int, typer.Option(help="Groups of a step.")]
Samples = Annotated[int, typer.Option(help="Responses of a group.")]
PromptTokens = Annotated[int, typer.Option(help="Tokens of a prompt, vision tokens included.")]
VisionTokens = Annotated[
    int | None, typer.Option(help="Vision tokens of a prompt. Default: seven eighths of it.")
]
ResponseTokens = Annotated[int, typer.Option(help="Tokens of a response.")]
GroupsInFlight = Annotated[
    int | None, typer.Option(help="Groups that an engine decodes at a time. Default: all.")
]
PrefixGraphs = Annotated[
    int | None, typer.Option(help="Most prefixes whose graph is kept. Default: as many as fit.")
]
Dtype = Annotated[str, typer.Option(help="Of weights and activations.")]
OptimizerDtype = Annotated[str, typer.Option(help="Of gradient accumulator, masters and moments.")]
TrainVision = Annotated[bool, typer.Option(help="Train the vision tower.")]
Checkpointing = Annotated[bool, typer.Option(help="Keep layer inputs of prefixes only.")]
SequenceParallel = Annotated[
    bool, typer.Option(help="Split what lies between the products over the ranks too.")
]
ShardOptimizer = Annotated[bool, typer.Option(help="Split masters and moments over the replicas.")]
SpillOptimizer = Annotated[
    bool, typer.Option(help="Keep masters and moments on the host while not needed.")
]
SpillReference = Annotated[
    bool, typer.Option(help="Keep reference weights on the host while nothing reads them.")
]
Ahead = Annotated[bool, typer.Option(help="Make the next step's reference prefixes in the window.")]
Headroom = Annotated[
    float, typer.Option(help="GiB of each GPU to be left free, for what allocators keep.")
]
Why = Annotated[bool, typer.Option("--why", help="Show every figure's formula.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(plan)


def plan(
    model: Model,
    gpus: Gpus = 1,
    gpu: Gpu = "h800",
    train_tp: TrainTp = None,
    rollout_tp: RolloutTp = None,
    prompts: Prompts = 32,
    samples: Samples = 8,
    prompt_tokens: PromptTokens = 4096,
    vision_tokens: VisionTokens = None,
    response_tokens: ResponseTokens = 512,
    groups_in_flight: GroupsInFlight = None,
    prefix_graphs: PrefixGraphs = None,
    dtype: Dtype = "bfloat16",
    optimizer_dtype: OptimizerDtype = "float32",
    train_vision: TrainVision = False,
    checkpointing: Checkpointing = False,
    sequence_parallel: SequenceParallel = True,
    shard_optimizer: ShardOptimizer = True,
    spill_optimizer: SpillOptimizer = True,
    spill_reference: SpillReference = False,
    ahead: Ahead = True,
    headroom: Headroom = 0.0,
    why: Why = False,
    as_json: AsJson = False,
) -> None:
    """Tell before a run what lies on a GPU when, and whether it fits; exit code 1: nothing does."""
    from common.vlm.shape import read_shape
    from rollplex.plan.request import Batch, PlanRequest, default_degree

    shape = read_shape(model)
    request = PlanRequest(
        shape=shape,
        gpu=gpu,
        gpus=gpus,
        train_tp=default_degree(shape, gpus, most=8) if train_tp is None else train_tp,
        rollout_tp=default_degree(shape, gpus, most=4) if rollout_tp is None else rollout_tp,
        batch=Batch(
            prompts=prompts,
            samples=samples,
            prompt_tokens=prompt_tokens,
            vision_tokens=prompt_tokens * 7 // 8 if vision_tokens is None else vision_tokens,
            response_tokens=response_tokens,
        ),
        groups_in_flight=groups_in_flight,
        prefix_graphs=prefix_graphs,
        dtype=dtype,
        optimizer_dtype=optimizer_dtype,
        train_vision=train_vision,
        checkpointing=checkpointing,
        sequence_parallel=sequence_parallel,
        shard_optimizer=shard_optimizer,
        spill_optimizer=spill_optimizer,
        spill_reference=spill_reference,
        ahead=ahead,
        headroom_bytes=_headroom_bytes(headroom),
    )
    _show(request, why=why, as_json=as_json)


def _headroom_bytes(headroom: float) -> int:
    size = headroom * 2**30
    if not math.isfinite(size):
        raise InvalidArgument(f"headroom = {headroom}: must be a number of GiB, 0 or more")
    return int(size)


def _show(request: PlanRequest, *, why: bool, as_json: bool) -> None:
    from rollplex.cli.plan_tables import print_document
    from rollplex.plan.document import document
    from rollplex.plan.plan import ROLLOUT_APART

    made = document(request)
    if as_json:
        print_json(made)
    else:
        print_document(made, why=why)
    if not any(one["fits"] for one in made["plans"] if one["name"] != ROLLOUT_APART):
        raise typer.Exit(FAILED)
