"""Whether a recipe can run on the ranks that the node has of each service, and where these are."""

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
    """Check what sets of GPUs and the ranks ask of a recipe; nothing with one rank on a CPU.

    Raises:
        InvalidArgument: names key, value and what is legal; DegreeInvalid for the model's sizes.
    """
    if deployment.device == "cuda":
        _check_gpus(recipe, deployment)
    degree = deployment.train_tp
    _check_engine(recipe, deployment)
    _check_schedule(recipe, deployment)
    if degree == 1:
        return
    if recipe.reward.on_error == "drop_group":
        raise InvalidArgument(
            'reward.on_error = "drop_group" on a node with train_tp = '
            f"{degree}: ranks cannot drop a group that they work on; legal are "
            '"default" and "stop"'
        )
    for path in {recipe.model.path, recipe.model.reference_path or recipe.model.path}:
        check_degree(read_shape(str(path)), degree)


def _check_engine(recipe: Recipe, deployment: Deployment) -> None:
    """Raises InvalidArgument."""
    if recipe.rollout.engine is not EngineName.SGLANG:
        return
    for name, value in (("train_tp", deployment.train_tp), ("dp", deployment.dp)):
        if value > 1:
            raise InvalidArgument(
                f'rollout.engine = "sglang" on a node with {name} = {value}: SGLang is run with '
                'one rank; legal is "native"'
            )


def _check_schedule(recipe: Recipe, deployment: Deployment) -> None:
    """A rank of the learner pushes what it updates, which with replicas is a share."""
    schedule = recipe.training.schedule
    if deployment.dp > 1 and schedule in OWN_WEIGHTS:
        raise InvalidArgument(
            f'training.schedule = "{schedule}" on a node with dp = {deployment.dp}: weights are '
            "pushed by one replica only; set dp = 1 (deployment), or another schedule"
        )


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
