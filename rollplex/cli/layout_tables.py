"""What `rollplex layout` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.layouts.model import legal_degrees
from rollplex.cli.tables import open_console, plain_table
from rollplex.plan.plan import gib

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from common.layouts.plan import SharingPlan
    from common.vlm.shape import ModelShape

PAIR_DEGREES = (1, 2, 4, 8)
"""Degrees in the table of all pairs, as far as a model allows them."""

_COLUMNS = (
    ("alias", "alias_bytes"),
    ("gather", "gather_bytes"),
    ("rebuild", "rebuild_bytes"),
    ("extra", "extra_bytes"),
    ("full copy", "full_second_copy_bytes"),
)


def print_sharing(document: Mapping[str, Any]) -> None:
    """A document of `common.layouts.document.document`, with ``model`` in it."""
    console = open_console()
    train, rollout = document["train"], document["rollout"]
    console.print(
        f"{document['model']}: training {train['layout']} TP {train['tp']}, rollout "
        f"{rollout['layout']} TP {rollout['tp']}, {document['gpus']} GPUs; GiB"
    )
    table = plain_table(
        "GPU", "training rank", "replica, rollout rank", *(name for name, _ in _COLUMNS)
    )
    for column in table.columns[3:]:
        column.justify = "right"
    for rank in document["ranks"]:
        table.add_row(
            str(rank["gpu"]),
            str(rank["train_rank"]),
            f"{rank['rollout_replica']}, {rank['rollout_rank']}",
            *(gib(rank[key]) for _, key in _COLUMNS),
        )
    table.add_row("all", "", "", *(gib(document[key]) for _, key in _COLUMNS))
    console.print(table)
    below = [f"alias in the plain order of ranks: {gib(document['plain_order_alias_bytes'])} GiB"]
    if "scratch_bytes" in document:
        below.append(f"scratch of a GPU: {gib(document['scratch_bytes'])} GiB")
    console.print(f"  {'; '.join(below)}")
    if "tensors" in document:
        tensors = plain_table("tensor", "layers", "kinds", "alias", "gather", "rebuild")
        for one in document["tensors"]:
            tensors.add_row(
                ", ".join(one["names"]),
                str(one["layers"]),
                ", ".join(one["kinds"]) + (" (strided)" if one["strided"] else ""),
                *(gib(one[key]) for _, key in _COLUMNS[:3]),
            )
        console.print(tensors)


def pairs_table(
    shape: ModelShape, make: Callable[[int, int], SharingPlan], *, plain_order: bool = True
) -> str:
    """Markdown: shares of the rollout's bytes over all GPUs, and GiB of one GPU, for all pairs.

    Args:
        make: the plan of a degree of training and one of the rollout.
        plain_order: whether there is a column for the plain order of ranks.
    """
    degrees = [degree for degree in PAIR_DEGREES if degree in legal_degrees(shape)]
    names = ["training TP", "rollout TP", "alias", "gather", "rebuild"]
    names += [*(["alias, plain order"] if plain_order else []), "extra GiB", "full copy GiB"]
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join('---:' for _ in names)} |"]
    for train_tp in degrees:
        for rollout_tp in degrees:
            plan = make(train_tp, rollout_tp)
            gpus = plan.gpus
            full = sum(gpu.full_second_copy_bytes for gpu in gpus)
            shares = [
                sum(gpu.alias_bytes for gpu in gpus),
                sum(gpu.gather_bytes for gpu in gpus),
                sum(gpu.rebuild_bytes for gpu in gpus),
                *([plan.plain_alias_bytes] if plain_order else []),
            ]
            extra = max(gpu.extra_bytes for gpu in gpus)
            cells = [str(train_tp), str(rollout_tp), *(f"{one / full:.1%}" for one in shares)]
            cells += [f"{extra / 2**30:.2f}", f"{full / len(gpus) / 2**30:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
