"""From a recipe to what the run machine needs of it."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from common.config.loading import check
from common.config.recipe import Recipe
from common.data.order import step_samples
from common.errors import InvalidArgument
from services.controller.plans import RunSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from common.ids import StepIndex
    from common.step.partners import Partners
    from common.step.place import Place

RESPONSES_FOLDER = "responses"
"""Where the rollout keeps a run's recorded responses, inside the run's folder."""


def read_recipe(recipe_json: str) -> Recipe:
    """Read a resolved recipe. Raises InvalidArgument with one line for each wrong key."""
    try:
        tree = json.loads(recipe_json)
    except ValueError as error:
        raise InvalidArgument(f"recipe_json is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise InvalidArgument(f"recipe_json holds {type(tree).__name__}, not a table")
    return check(Recipe, tree, source="the request")


def run_settings(
    recipe: Recipe,
    *,
    train_rows: int,
    eval_rows: int,
    place: Place,
    partners: Partners | None = None,
) -> RunSettings:
    """Args:
    train_rows, eval_rows: length of the data sets; `eval_rows` 0: there is none.
    place, partners: as in `RunSettings`.
    """
    training = recipe.training
    return RunSettings(
        steps=training.steps,
        prompts_per_step=training.prompts_per_step,
        samples_per_group=recipe.rollout.samples_per_group,
        schedule=training.schedule,
        eval_rows=min(training.eval_prompts or eval_rows, eval_rows),
        eval_every_steps=training.eval_every_steps,
        checkpoint_every_steps=training.checkpoint_every_steps,
        final_checkpoint=training.final_checkpoint,
        max_drop_fraction=recipe.data.max_drop_fraction,
        needs_reference=recipe.needs_reference,
        step_deadline_s=training.step_deadline_s,
        replay_dir=_replay_dir(training.replay_from),
        ahead=training.ahead,
        place=place,
        partners=partners,
        order=partial(_order, recipe.seed, training.prompts_per_step, train_rows),
    )


def _replay_dir(run_dir: Path | None) -> str | None:
    return None if run_dir is None else str(run_dir.absolute() / RESPONSES_FOLDER)


def _order(seed: int, prompts_per_step: int, rows: int, step: StepIndex) -> Sequence[int]:
    return step_samples(seed=seed, step=step, prompts_per_step=prompts_per_step, dataset_rows=rows)
