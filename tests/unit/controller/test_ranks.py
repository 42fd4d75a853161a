"""What a node of several ranks asks of a recipe."""

from __future__ import annotations

import json

import pytest

from common.config.deployment import Deployment
from common.errors import InvalidArgument
from common.step.schedule import OWN_WEIGHTS, Schedule
from common.vlm.errors import DegreeInvalid
from common.vlm.tiny import tiny_config
from services.controller.ranks import check_ranks
from tests.integration.runs.recipes import recipe


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().to_dict()))
    return tmp_path


def node(degree, **settings):
    return Deployment(train_tp=degree, rollout_tp=degree, **settings)


def rewarded(model, on_error):
    functions = [{"function": "rollplex.verify.task:checksum_reward"}]
    return recipe(model, reward={"functions": functions, "on_error": on_error})


def test_one_rank_asks_for_nothing(tmp_path):
    check_ranks(rewarded(tmp_path / "absent", "drop_group"), node(1))


@pytest.mark.parametrize("on_error", ["default", "stop"])
def test_rewards_that_drop_no_group_are_legal(model, on_error):
    check_ranks(rewarded(model, on_error), node(2))


def test_dropping_groups_is_refused_by_name(model):
    with pytest.raises(InvalidArgument, match=r'on_error = "drop_group".*"default" and "stop"'):
        check_ranks(rewarded(model, "drop_group"), node(2))


def test_a_degree_that_does_not_divide_the_model_is_refused(model):
    with pytest.raises(DegreeInvalid, match="tensor-parallel degree = 7"):
        check_ranks(rewarded(model, "stop"), node(7))


def test_sglang_has_one_rank(model):
    table = {"samples_per_group": 2, "max_new_tokens": 4, "max_slots": 8, "engine": "sglang"}
    functions = [{"function": "rollplex.verify.task:checksum_reward"}]
    reward = {"functions": functions, "on_error": "stop"}
    wanted = recipe(model, reward=reward, rollout=table)
    check_ranks(wanted, node(1))
    for several, name in ((node(2), "train_tp"), (Deployment(dp=2), "dp")):
        with pytest.raises(InvalidArgument, match=rf'rollout\.engine = "sglang".*{name} = 2'):
            check_ranks(wanted, several)


def test_replicas_push_no_weights(tmp_path):
    wanted = recipe(tmp_path / "absent", Schedule.DISAGGREGATED)
    check_ranks(wanted, node(1))
    with pytest.raises(InvalidArgument, match=r'"disaggregated" on a node with dp = 2'):
        check_ranks(wanted, Deployment(dp=2))


def test_replicas_may_drop_groups(model):
    check_ranks(rewarded(model, "drop_group"), Deployment(dp=2))


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_rollout_shares_gpus_where_it_shares_weights(tmp_path, schedule):
    right, wrong = ("own", "shared") if schedule in OWN_WEIGHTS else ("shared", "own")
    wanted = recipe(tmp_path / "absent", schedule)
    check_ranks(wanted, node(1, device="cuda", rollout_gpus=right))
    with pytest.raises(InvalidArgument, match=f'"{schedule}".*needs rollout_gpus = "{right}"'):
        check_ranks(wanted, node(1, device="cuda", rollout_gpus=wrong))
    check_ranks(wanted, node(1, rollout_gpus=wrong))
