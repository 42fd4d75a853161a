from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from common.rl.config import AlgorithmConfig
from common.rl.lr import learning_rate
from common.rl.reward_config import RewardConfig


@pytest.mark.parametrize(
    ("estimator", "placement"), [("k1", "reward"), ("k2", "loss"), ("k3", "loss")]
)
def test_the_place_of_the_kl_term_follows_from_the_estimator(estimator, placement):
    config = AlgorithmConfig(kl_estimator=estimator)
    assert config.kl_placement == placement
    assert AlgorithmConfig.model_validate_json(config.resolved_json()) == config


@pytest.mark.parametrize(("estimator", "placement"), [("k1", "loss"), ("k3", "reward")])
def test_an_estimator_in_the_wrong_place_is_refused(estimator, placement):
    with pytest.raises(ValidationError, match=f"{estimator} may be used in the"):
        AlgorithmConfig(kl_estimator=estimator, kl_placement=placement)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("betas", (0.9, 1.0)),
        ("clip_low", 1.0),
        ("nonfinite_limit", 0),
        ("max_grad_norm", 0.0),
        ("learning_rate", float("nan")),
        ("kl_estimator", "k4"),
        ("unknown", 1),
    ],
)
def test_illegal_values_name_their_key(key, value):
    with pytest.raises(ValidationError, match=key):
        AlgorithmConfig(**{key: value})


def test_reward_config_round_trips_and_names_what_is_wrong():
    functions = [{"function": "a.b:c"}, {"function": "x/y.py:z", "weight": 0.5}]
    config = RewardConfig(functions=functions)
    assert RewardConfig.model_validate_json(config.resolved_json()) == config
    for wrong, message in [
        ({"functions": []}, "functions"),
        ({"functions": [{"function": "no_colon"}]}, "module:function"),
        ({"functions": [functions[0], functions[0]]}, "more than once"),
        ({"functions": functions, "default_value": 1.0}, "has a meaning only with"),
        ({"functions": functions, "time_limit_s": 0}, "time_limit_s"),
        ({"functions": [{"function": "a:b", "weight": 0}]}, "must have weight other than 0"),
        (
            {"functions": [{"function": "a:b", "eval_weight": 0}]},
            "must have eval_weight other than 0",
        ),
    ]:
        with pytest.raises(ValidationError, match=message):
            RewardConfig(**wrong)


def test_held_out_weights_are_those_of_the_training_unless_given():
    config = RewardConfig(
        functions=[
            {"function": "a:b", "weight": 0.5},
            {"function": "a:c", "weight": 2.0, "eval_weight": 0.0},
            {"function": "a:d", "weight": 0.0, "eval_weight": -1.0},
        ]
    )
    assert config.weights(evaluation=False) == {"a:b": 0.5, "a:c": 2.0}
    assert config.weights(evaluation=True) == {"a:b": 0.5, "a:d": -1.0}


def test_warm_up_then_constant():
    config = AlgorithmConfig(learning_rate=1.0, warmup_steps=4)
    rates = [learning_rate(step, 10, config) for step in range(7)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]


def test_cosine_falls_from_the_highest_rate_to_its_share():
    config = AlgorithmConfig(
        learning_rate=1.0, warmup_steps=2, lr_schedule="cosine", min_lr_ratio=0.1
    )
    rates = [learning_rate(step, 13, config) for step in range(15)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.55)
    assert rates[12] == pytest.approx(0.1)
    assert rates[14] == pytest.approx(0.1)
    assert rates[2:13] == sorted(rates[2:13], reverse=True)


def test_a_cosine_without_room_ends_at_once():
    config = AlgorithmConfig(learning_rate=1.0, lr_schedule="cosine")
    assert learning_rate(0, 1, config) == 0.0


def test_configuration_imports_without_torch():
    code = (
        "import sys, common.rl.config, common.rl.reward_config, common.rl.lr;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
