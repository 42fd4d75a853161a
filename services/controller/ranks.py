"""Whether a recipe can run on the node's ranks, where these are, and with its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config.recipe import EngineName
from common.errors import InvalidArgument
from common.ids import Service
from common.layouts.heads import nested_heads
from common.layouts.kinds import VOCABULARY_MULTIPLES, LayoutName
from common.step.schedule import OWN_WEIGHTS, PREFILL_FROM_LEASE, Schedule
from common.vlm.parallel.shards import check_degree
from common.vlm.shape import read_shape

if TYPE_CHECKING:
    from common.config.deployment import Deployment
    from common.config.recipe import Recipe


def check_ranks(recipe: Recipe, deployment: Deployment) -> None:
    """Check what sets of GPUs, the engine and the degrees ask of a recipe.

    Raises:
        InvalidArgument: names key, value and what is legal; DegreeInvalid for the model's sizes.
    """
    if deployment.device == "cuda":
        _check_gpus(recipe, deployment)
    _check_environment(recipe, deployment)
    _check_pushes(recipe.training.schedule, deployment)
    train, rollout = deployment.train_tp, deployment.rollout_tp
    if train == rollout == 1:
        return
    here = f"on a node with train_tp = {train} and rollout_tp = {rollout}"
    if recipe.reward.on_error == "drop_group":
        raise InvalidArgument(
            f'reward.on_error = "drop_group" {here}: ranks cannot drop a group that they work on; '
            'legal are "default" and "stop"'
        )
    shape = read_shape(str(recipe.model.path))
    check_degree(shape, train)
    check_degree(shape, rollout)
    if recipe.model.reference_path is not None:
        check_degree(read_shape(str(recipe.model.reference_path)), train)
    _check_schedule(recipe.training.schedule, shape.kv_heads, deployment, here)
    if recipe.rollout.engine is EngineName.SGLANG:
        _check_sglang(recipe, shape.vocabulary, deployment, here)


def _check_schedule(schedule: Schedule, kv_heads: int, deployment: Deployment, here: str) -> None:
    """Args: kv_heads: of the model. here: the node, for messages."""
    if schedule in PREFILL_FROM_LEASE and not _nests(kv_heads, deployment):
        raise InvalidArgument(
            f'training.schedule = "{schedule}" {here}: its rollout begins from the K/V of one rank '
            f"of training, and of {kv_heads} key/value heads a rank of the rollout has some that "
            'this one lacks; legal are "serial", "rollplex", or a rollout_tp that is a multiple of '
            "train_tp"
        )


def _nests(kv_heads: int, deployment: Deployment) -> bool:
    """Whether each rank of the rollout has key/value heads of the one rank that it reads only."""
    partners = deployment.partners
    return all(
        nested_heads(
            kv_heads,
            reader=partners.cut(one),
            holder=partners.cut(partners.partner(one, Service.PREFIX_ENCODER)),
        )
        is not None
        for one in partners.all(Service.ROLLOUT)
    )


def _check_environment(recipe: Recipe, deployment: Deployment) -> None:
    if recipe.rollout.engine is EngineName.SGLANG and deployment.engine_python is None:
        raise InvalidArgument(
            'rollout.engine = "sglang" on a node without engine_python: SGLang has an environment '
            "of its own; name its interpreter there (docs/sglang.md)"
        )


def _check_sglang(recipe: Recipe, vocabulary: int, deployment: Deployment, here: str) -> None:
    """Args: vocabulary: of the model. here: the node, for messages."""
    if deployment.train_tp != deployment.rollout_tp:
        raise InvalidArgument(
            f'rollout.engine = "sglang" {here}: SGLang reads the weights of training\'s ranks in '
            'place; legal is "native", or equal degrees'
        )
    table = recipe.rollout.sglang
    if table is not None and table.weights == "copy":
        raise InvalidArgument(
            f'rollout.sglang.weights = "copy" {here}: one rank has a part of the weights only; '
            'legal is "alias"'
        )
    if vocabulary % VOCABULARY_MULTIPLES[LayoutName.SGLANG]:
        raise InvalidArgument(
            f'rollout.engine = "sglang" {here}: SGLang pads the {vocabulary} rows of the tables of '
            "tokens to a multiple of 64 before it cuts them; legal are models without that "
            'padding, or "native"'
        )


def _check_pushes(schedule: Schedule, deployment: Deployment) -> None:
    partners = deployment.partners
    training, rollout = (
        (partners.count(service), partners.replica_count(service))
        for service in (Service.LEARNER, Service.ROLLOUT)
    )
    if schedule in OWN_WEIGHTS and training != rollout:
        raise InvalidArgument(
            f'training.schedule = "{schedule}" on a node with train_tp = {training[0]}, dp = '
            f"{training[1]}, rollout_tp = {rollout[0]} and rollout_dp = {rollout[1]}: weights are "
            'pushed from rank to rank; legal are "serial", "rollplex", or equal degrees and '
            "replicas"
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
