"""What `rollplex plan` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex.cli.tables import open_console, plain_table
from rollplex.plan.plan import gib
from rollplex.plan.table import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console


def print_document(document: Mapping[str, Any], *, why: bool) -> None:
    """All plans of a document from `rollplex.plan.document.document`.

    Args:
        why: show how each class's bytes come about.
    """
    console = open_console()
    model, gpu = document["model"], document["gpu"]
    budget = gpu["budget_bytes"]
    console.print(
        f"{model['name']}, {model['parameters'] / 1e9:.2f} billion parameters, on "
        f"{document['parallel']['gpus']} {gpu['name']} with {gib(budget)} GiB each; GiB a GPU"
    )
    for plan in document["plans"]:
        _print_plan(console, plan, budget, why=why)
    console.print("\nassumptions")
    for line in document["assumptions"]:
        console.print(f"  {line}")


def _print_plan(console: Console, plan: Mapping[str, Any], budget: int, *, why: bool) -> None:
    verdict = "fits" if plan["fits"] else "DOES NOT FIT"
    console.print(
        f"\n{plan['name']}: {gib(plan['peak_bytes'])} of {gib(budget)} GiB, {verdict}", style="bold"
    )
    table = plain_table("", *(phase.value for phase in Phase))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in plan["classes"]:
        table.add_row(row["name"], *(_cell(row["bytes"][phase.value]) for phase in Phase))
    table.add_row("total", *(gib(plan["totals"][phase.value]) for phase in Phase))
    table.add_row("free", *(gib(budget - plan["totals"][phase.value]) for phase in Phase))
    console.print(table)
    if plan["excess"]:
        worst = max(plan["excess"], key=lambda over: over["bytes"])
        console.print(
            f"  over in {', '.join(over['phase'] for over in plan['excess'])}, by up to "
            f"{gib(worst['bytes'])} GiB; most of it: {', '.join(worst['largest'])}"
        )
    for note in plan["notes"]:
        console.print(f"  {note}")
    if plan["host_bytes"]:
        console.print(f"  host memory a GPU: {gib(plan['host_bytes'])} GiB")
    if plan["recipe"]:
        sets = " ".join(
            f"--set training.{key}={_value(value)}"
            for key, value in plan["recipe"]["training"].items()
        )
        console.print(f"  {sets}", soft_wrap=True)
    if why:
        for row in plan["classes"]:
            console.print(f"  {row['name']}: {row['why']}", soft_wrap=True)


def _cell(size_bytes: int) -> str:
    return gib(size_bytes) if size_bytes else "-"


def _value(value: Any) -> str:
    """As a recipe writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
