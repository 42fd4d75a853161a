from __future__ import annotations

from typing import Any

import pytest

from common.config.base import ConfigError
from common.config.loading import check
from common.config.recipe import Recipe


def _recipe(**tables: dict[str, Any]) -> Recipe:
    tree: dict[str, Any] = {
        "name": "r",
        "model": {"path": "m"},
        "data": {"train": "a:b"},
        "rollout": {"max_new_tokens": 8, "samples_per_group": 4},
        "reward": {"functions": [{"function": "a:b"}]},
        "algorithm": {},
        "training": {"steps": 1, "prompts_per_step": 2},
    }
    for name, values in tables.items():
        tree[name] = tree[name] | values
    return check(Recipe, tree, source="the test")


def test_a_prefix_is_run_once_unless_it_is_not_shared():
    assert _recipe().prefix_passes == 1
    unshared = _recipe(training={"schedule": "serial", "share_prefix": False})
    assert unshared.prefix_passes == 4


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"model": {"weights": "random", "reference_path": "r"}}, "leave reference_path unset"),
        ({"rollout": {"lengths": {"kind": "fixed", "max_tokens": 9}}}, "over max_new_tokens = 8"),
        ({"training": {"prefix_graphs": 0}}, "prefix_graphs"),
        ({"training": {"prefix_graphs": "some"}}, "'auto' or 'all'"),
        ({"rollout": {"max_slots": 3}}, "cannot hold one group"),
        ({"training": {"share_prefix": False}}, 'schedule = "serial" only'),
        ({"rollout": {"sglang": {}}}, "a table sglang with engine = 'native'"),
        (
            {
                "rollout": {
                    "engine": "sglang",
                    "sglang": {"arguments": {"enable_memory_saver": False}},
                }
            },
            "enable_memory_saver is set by release_memory",
        ),
        (
            {"rollout": {"engine": "sglang", "sglang": {"arguments": {"tp_size": 2}}}},
            r"tp_size is set by rollout_tp \(deployment\)",
        ),
        (
            {"rollout": {"engine": "sglang"}, "training": {"schedule": "fused"}},
            "training.schedule = 'fused' with rollout.engine",
        ),
        (
            {"rollout": {"engine": "sglang"}, "training": {"replay_from": "runs/old"}},
            "training.replay_from = 'runs/old' with rollout.engine",
        ),
        (
            {"rollout": {"engine": "sglang"}, "model": {"dtype": "float64"}},
            "model.dtype = 'float64' with rollout.engine",
        ),
        (
            {
                "training": {"share_prefix": False, "schedule": "serial"},
                "model": {"train_vision": True},
            },
            "one backward a group",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(tables, words):
    with pytest.raises(ConfigError, match=words):
        _recipe(**tables)


def test_the_bound_is_that_of_an_engine_with_its_own_passes():
    assert _recipe().rollout.logprob_bound is None
    assert _recipe(rollout={"engine": "sglang"}).rollout.logprob_bound == 0.1
    table = {"engine": "sglang", "sglang": {"logprob_bound": 0.02}}
    assert _recipe(rollout=table).rollout.logprob_bound == 0.02
