"""`rollplex layout`."""

from __future__ import annotations

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
RolloutLayout = Annotated[str, typer.Option(help="native or sglang.")]
Gpus = Annotated[
    int | None,
    typer.Option(help="GPUs of the whole run. Default: the least that both degrees divide."),
]
Dtype = Annotated[str, typer.Option(help="Of the weights: bfloat16 or float32.")]
Tensors = Annotated[bool, typer.Option("--tensors", help="List the rollout's tensors.")]
Pairs = Annotated[
    bool, typer.Option("--pairs", help="A Markdown table of all degrees up to 8 instead.")
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
    rollout_layout: RolloutLayout = "sglang",
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
    shape, element_bytes = read_shape(model), DTYPE_BYTES[dtype]
    if pairs:
        print(pairs_table(shape, train_layout, rollout_layout, element_bytes))
        return
    plan = _plan(shape, (train_layout, train_tp), (rollout_layout, rollout_tp), element_bytes, gpus)
    made = {"model": model, "dtype": dtype, **document(plan, tensors=tensors)}
    if as_json:
        print_json(made)
    else:
        print_sharing(made)


def _plan(
    shape: ModelShape,
    train: tuple[str, int],
    rollout: tuple[str, int],
    element_bytes: int,
    gpus: int | None,
) -> SharingPlan:
    from common.layouts.model import layout_pair
    from common.layouts.plan import plan_sharing

    layouts = layout_pair(shape, train, rollout)
    return plan_sharing(*layouts, element_bytes=element_bytes, gpus=gpus)
