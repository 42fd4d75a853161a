"""`rollplex layout`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import InvalidArgument
from rollplex.cli.options import print_json

if TYPE_CHECKING:
    from common.layouts.plan import SharingPlan
    from common.vlm.shape import ModelShape

Model = Annotated[
    str, typer.Option(help="Folder with config.json, or a name such as qwen2.5-vl-32b.")
]
TrainTp = Annotated[int, typer.Option(help="Tensor-parallel degree of training.")]
RolloutTp = Annotated[int, typer.Option(help="The same of the rollout.")]
TrainLayout = Annotated[str, typer.Option(help="native or megatron.")]
RolloutLayout = Annotated[
    str | None, typer.Option(help="native or sglang. Default: sglang; with --services, native.")
]
Gpus = Annotated[
    int | None,
    typer.Option(help="GPUs of the whole run. Default: the least that both degrees divide."),
]
Dtype = Annotated[str, typer.Option(help="Of the weights: bfloat16 or float32.")]
Tensors = Annotated[bool, typer.Option("--tensors", help="List the rollout's tensors.")]
Pairs = Annotated[
    bool, typer.Option("--pairs", help="A Markdown table of all degrees up to 8 instead.")
]
Services = Annotated[
    bool,
    typer.Option(
        "--services", help="What a node's services do: both native, matrices as plain views."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(layout)


def layout(
    model: Model,
    train_tp: TrainTp = 1,
    rollout_tp: RolloutTp = 1,
    train_layout: TrainLayout = "native",
    rollout_layout: RolloutLayout = None,
    services: Services = False,
    gpus: Gpus = None,
    dtype: Dtype = "bfloat16",
    tensors: Tensors = False,
    pairs: Pairs = False,
    as_json: AsJson = False,
) -> None:
    """Tell which weights training and rollout can share on each GPU, and what is copied."""
    from common.layouts.document import document
    from common.vlm.shape import read_shape
    from rollplex.cli.layout_tables import pairs_table, print_sharing
    from rollplex.plan.request import DTYPE_BYTES

    if dtype not in DTYPE_BYTES:
        raise InvalidArgument(f"dtype = {dtype!r}: legal are {', '.join(DTYPE_BYTES)}")
    layouts = (train_layout, rollout_layout or ("native" if services else "sglang"))
    if services and (layouts != ("native", "native") or gpus is not None):
        raise InvalidArgument(
            "--services shows one node whose layouts are native: leave out --train-layout, "
            "--rollout-layout and --gpus"
        )
    make = partial(
        _plan,
        read_shape(model),
        layouts,
        element_bytes=DTYPE_BYTES[dtype],
        gpus=gpus,
        services=services,
    )
    if pairs:
        print(pairs_table(read_shape(model), make, plain_order=not services))
        return
    plan = make(train_tp, rollout_tp)
    made = {"model": model, "dtype": dtype, **document(plan, tensors=tensors, scratch=not services)}
    if as_json:
        print_json(made)
    else:
        print_sharing(made)


def _plan(
    shape: ModelShape,
    layouts: tuple[str, str],
    train_tp: int,
    rollout_tp: int,
    *,
    element_bytes: int,
    gpus: int | None,
    services: bool,
) -> SharingPlan:
    from common.layouts.model import layout_pair
    from common.layouts.node import node_plan
    from common.layouts.plan import plan_sharing

    if services:
        return node_plan(
            shape,
            train_tp=train_tp,
            rollout_tp=rollout_tp,
            element_bytes=element_bytes,
            rollout_replicas=max(1, train_tp // rollout_tp),
        )
    train, rollout = layouts
    pair = layout_pair(shape, (train, train_tp), (rollout, rollout_tp))
    return plan_sharing(*pair, element_bytes=element_bytes, gpus=gpus)
