"""What a node of several ranks asks of a recipe."""

from __future__ import annotations

import json
import sys

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


def node(train_tp, rollout_tp=None, **settings):
    return Deployment(train_tp=train_tp, rollout_tp=rollout_tp or train_tp, **settings)


def rewarded(model, on_error):
    functions = [{"function": "rollplex.verify.task:checksum_reward"}]
    return recipe(model, reward={"functions": functions, "on_error": on_error})


def scheduled(model, schedule):
    return recipe(model, schedule, reward=rewarded(model, "stop").reward.model_dump())


def test_one_rank_asks_for_nothing(tmp_path):
    check_ranks(rewarded(tmp_path / "absent", "drop_group"), node(1))


@pytest.mark.parametrize("on_error", ["default", "stop"])
def test_rewards_that_drop_no_group_are_legal(model, on_error):
    check_ranks(rewarded(model, on_error), node(2))


def test_dropping_groups_is_refused_by_name(model):
    with pytest.raises(InvalidArgument, match=r'on_error = "drop_group".*"default" and "stop"'):
        check_ranks(rewarded(model, "drop_group"), node(2))


@pytest.mark.parametrize("degrees", [(7, 7), (1, 7), (7, 1)], ids=str)
def test_a_degree_that_does_not_divide_the_model_is_refused(model, degrees):
    with pytest.raises(DegreeInvalid, match="tensor-parallel degree = 7"):
        check_ranks(rewarded(model, "stop"), node(*degrees))


@pytest.mark.parametrize("degrees", [(1, 2), (1, 4), (2, 4), (4, 2), (4, 4)], ids=str)
def test_fused_is_legal_where_key_value_heads_nest(model, degrees):
    """Of two heads, each of four ranks has one."""
    check_ranks(scheduled(model, Schedule.FUSED), node(*degrees))


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=str)
def test_pushes_from_rank_to_rank_need_as_many_on_either_side(model, degrees):
    for schedule in OWN_WEIGHTS:
        check_ranks(scheduled(model, schedule), node(2))
        with pytest.raises(InvalidArgument, match=rf'"{schedule}" .*rank to rank.* equal degrees'):
            check_ranks(scheduled(model, schedule), node(*degrees))


@pytest.mark.parametrize("degrees", [(2, 1), (4, 1)], ids=str)
def test_fused_is_refused_where_key_value_heads_do_not_nest(model, degrees):
    train, rollout = degrees
    for schedule in (Schedule.SERIAL, Schedule.ROLLPLEX):
        check_ranks(scheduled(model, schedule), node(*degrees))
    refused = rf'"fused" on a node with train_tp = {train} and rollout_tp = {rollout}: .*"rollplex"'
    with pytest.raises(InvalidArgument, match=refused):
        check_ranks(scheduled(model, Schedule.FUSED), node(*degrees))


def sampled_by_sglang(model, **sglang):
    table = {"samples_per_group": 2, "max_new_tokens": 4, "max_slots": 8, "engine": "sglang"}
    reward = rewarded(model, "stop").reward.model_dump()
    return recipe(model, reward=reward, rollout={**table, "sglang": sglang})


def test_sglang_needs_an_environment(model):
    with pytest.raises(InvalidArgument, match=r'rollout\.engine = "sglang".*engine_python'):
        check_ranks(sampled_by_sglang(model), node(1))


def test_sglang_has_the_ranks_that_training_has(model):
    (model / "config.json").write_text(json.dumps(tiny_config(vocab_size=384).to_dict()))
    for ranks in (1, 2):
        check_ranks(sampled_by_sglang(model), node(ranks, engine_python=sys.executable))
    for degrees in ((1, 2), (2, 1)):
        with pytest.raises(InvalidArgument, match=r'engine = "sglang".*equal degrees'):
            check_ranks(sampled_by_sglang(model), node(*degrees, engine_python=sys.executable))


def test_sglang_copies_no_parts_of_weights(model):
    here = node(2, engine_python=sys.executable)
    with pytest.raises(InvalidArgument, match=r'sglang\.weights = "copy".*legal is "alias"'):
        check_ranks(sampled_by_sglang(model, weights="copy"), here)


def test_sglang_cuts_no_padded_table(model):
    (model / "config.json").write_text(json.dumps(tiny_config(vocab_size=200).to_dict()))
    check_ranks(sampled_by_sglang(model), node(1, engine_python=sys.executable))
    with pytest.raises(InvalidArgument, match=r'engine = "sglang".*200 rows.*"native"'):
        check_ranks(sampled_by_sglang(model), node(2, engine_python=sys.executable))


def test_a_rollout_of_other_replicas_is_not_pushed_to(tmp_path):
    wanted = recipe(tmp_path / "absent", Schedule.DISAGGREGATED)
    refused = r'"disaggregated" on a node with .*dp = 1, .* and rollout_dp = 2: .*replicas'
    with pytest.raises(InvalidArgument, match=refused):
        check_ranks(wanted, Deployment(rollout_dp=2))


@pytest.mark.parametrize("schedule", sorted(set(Schedule) - OWN_WEIGHTS))
@pytest.mark.parametrize("replicas", [(1, 2), (2, 1), (2, 4)], ids=str)
def test_replicas_of_another_number_run_every_other_schedule(tmp_path, schedule, replicas):
    node = Deployment(dp=replicas[0], rollout_dp=replicas[1])
    check_ranks(recipe(tmp_path / "absent", schedule), node)


def test_replicas_may_drop_groups_and_push_weights(model):
    check_ranks(rewarded(model, "drop_group"), Deployment(dp=2))
    check_ranks(scheduled(model, Schedule.DISAGGREGATED), Deployment(dp=2))


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_rollout_shares_gpus_where_it_shares_weights(tmp_path, schedule):
    right, wrong = ("own", "shared") if schedule in OWN_WEIGHTS else ("shared", "own")
    wanted = recipe(tmp_path / "absent", schedule)
    check_ranks(wanted, node(1, device="cuda", rollout_gpus=right))
    with pytest.raises(InvalidArgument, match=f'"{schedule}".*needs rollout_gpus = "{right}"'):
        check_ranks(wanted, node(1, device="cuda", rollout_gpus=wrong))
    check_ranks(wanted, node(1, rollout_gpus=wrong))
