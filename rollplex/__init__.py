"""Rollplex: RL post-training of vision-language models.

The client of a running controller::

    async with await Client.connect() as client:
        run = await client.create_run(Path("recipe.toml"))
        async for update in client.watch_run(run.run_id):
            print(update.run.state, update.run.steps_done)

Names are loaded when they are first used, so importing this package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.config.recipe import Recipe
    from common.errors import (
        AlreadyExists,
        DeadlineExceeded,
        FailedPrecondition,
        InvalidArgument,
        NotFound,
        ResourceExhausted,
        RollplexError,
        Stale,
        Unavailable,
    )
    from common.step.plan import StepMode
    from rollplex.client import Client
    from rollplex.ledger import Ledger, LedgerArena, LedgerEntry
    from rollplex.models import (
        Checkpoint,
        Cluster,
        Run,
        RunState,
        RunUpdate,
        ServiceEntry,
        ServicePhase,
        StepRecord,
    )
    from rollplex.recipes import load_recipe
    from rollplex.weights import ConsumerWeights, WeightsDifference, WeightsReport

_HOMES = {
    "AlreadyExists": "common.errors",
    "Checkpoint": "rollplex.models",
    "Client": "rollplex.client",
    "Cluster": "rollplex.models",
    "ConsumerWeights": "rollplex.weights",
    "DeadlineExceeded": "common.errors",
    "FailedPrecondition": "common.errors",
    "InvalidArgument": "common.errors",
    "Ledger": "rollplex.ledger",
    "LedgerArena": "rollplex.ledger",
    "LedgerEntry": "rollplex.ledger",
    "NotFound": "common.errors",
    "Recipe": "common.config.recipe",
    "ResourceExhausted": "common.errors",
    "RollplexError": "common.errors",
    "Run": "rollplex.models",
    "RunState": "rollplex.models",
    "RunUpdate": "rollplex.models",
    "ServiceEntry": "rollplex.models",
    "ServicePhase": "rollplex.models",
    "Stale": "common.errors",
    "StepMode": "common.step.plan",
    "StepRecord": "rollplex.models",
    "Unavailable": "common.errors",
    "WeightsDifference": "rollplex.weights",
    "WeightsReport": "rollplex.weights",
    "load_recipe": "rollplex.recipes",
}

__all__ = [
    "AlreadyExists",
    "Checkpoint",
    "Client",
    "Cluster",
    "ConsumerWeights",
    "DeadlineExceeded",
    "FailedPrecondition",
    "InvalidArgument",
    "Ledger",
    "LedgerArena",
    "LedgerEntry",
    "NotFound",
    "Recipe",
    "ResourceExhausted",
    "RollplexError",
    "Run",
    "RunState",
    "RunUpdate",
    "ServiceEntry",
    "ServicePhase",
    "Stale",
    "StepMode",
    "StepRecord",
    "Unavailable",
    "WeightsDifference",
    "WeightsReport",
    "load_recipe",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
