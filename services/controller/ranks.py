"""Whether a recipe can run on the ranks that the node has of each service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config.recipe import EngineName
from common.errors import InvalidArgument
from common.vlm.parallel.shards import check_degree
from common.vlm.shape import read_shape

if TYPE_CHECKING:
    from common.config.deployment import Deployment
    from common.config.recipe import Recipe


def check_ranks(recipe: Recipe, deployment: Deployment) -> None:
    """Check what the ranks ask of a recipe; nothing with one rank.

    Raises:
        InvalidArgument: names key, value and what is legal; DegreeInvalid for the model's sizes.
    """
    degree = deployment.train_tp
    _check_engine(recipe, deployment)
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
