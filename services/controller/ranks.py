"""Whether a recipe can run on the node's ranks, where these are, and with its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config.recipe import EngineName
from common.errors import InvalidArgument
from common.step.schedule import OWN_WEIGHTS
from common.vlm.parallel.shards import check_degree
from common.vlm.shape import read_shape

if TYPE_CHECKING:
    from common.config.deployment import Deployment
    from common.config.recipe import Recipe


def check_ranks(recipe: Recipe, deployment: Deployment) -> None:
    """Check what sets of GPUs, the engine and the degree ask of a recipe.

    Raises:
        InvalidArgument: names key, value and what is legal; DegreeInvalid for the model's sizes.
    """
    if deployment.device == "cuda":
        _check_gpus(recipe, deployment)
    degree = deployment.train_tp
    if recipe.rollout.engine is EngineName.SGLANG and deployment.engine_python is None:
        raise InvalidArgument(
            'rollout.engine = "sglang" on a node without engine_python: SGLang has an environment '
            "of its own; name its interpreter there (docs/sglang.md)"
        )
    if degree == 1:
        return
    if recipe.reward.on_error == "drop_group":
        raise InvalidArgument(
            'reward.on_error = "drop_group" on a node with train_tp = '
            f"{degree}: ranks cannot drop a group that they work on; legal are "
            '"default" and "stop"'
        )
    if recipe.rollout.engine is EngineName.SGLANG:
        raise InvalidArgument(
            f'rollout.engine = "sglang" on a node with train_tp = {degree}: SGLang is run without '
            'tensor parallelism; legal is "native"'
        )
    for path in {recipe.model.path, recipe.model.reference_path or recipe.model.path}:
        check_degree(read_shape(str(path)), degree)


def _check_gpus(recipe: Recipe, deployment: Deployment) -> None:
    """Whoever shares weights is on one GPU; whoever does not is on two."""
    schedule = recipe.training.schedule
    if (schedule in OWN_WEIGHTS) == deployment.apart:
        return
    gpus = "own" if schedule in OWN_WEIGHTS else "shared"
    raise InvalidArgument(
        f'training.schedule = "{schedule}" on a node with rollout_gpus = '
        f'"{deployment.rollout_gpus}": it needs rollout_gpus = "{gpus}" (deployment)'
    )
