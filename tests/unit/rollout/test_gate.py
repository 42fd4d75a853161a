"""The gate between an engine's log-probabilities and the trainer's, with the native engine."""

from __future__ import annotations

import pytest
import torch

from common.ids import StepIndex, WeightsVersion
from common.rl.sampling import SamplingParams
from common.vlm.bound import bound_model
from common.vlm.loading import suppressed_token_ids
from common.vlm.model import SplitModel
from common.vlm.tiny import tiny_config
from services.rollout.engines.errors import LogprobGateFailed
from services.rollout.engines.gate import NEW_TOKENS, gate_step, logprob_gate
from services.rollout.engines.native import NativeEngine
from services.rollout.engines.protocol import StepSpec

CONFIG = tiny_config()
BOUND = 1e-5


def model(seed: int) -> SplitModel:
    bound = bound_model(CONFIG, dtype=torch.float32, train_vision=False, seed=seed)
    return SplitModel(bound.model)


def step() -> StepSpec:
    params = SamplingParams(
        max_new_tokens=NEW_TOKENS,
        stop_token_ids=(),
        temperature=0.8,
        suppressed_token_ids=suppressed_token_ids(CONFIG),
    )
    spec = StepSpec(
        step=StepIndex(4),
        weights_version=WeightsVersion(3),
        seed=1,
        groups=(),
        samples_per_group=5,
        params=params,
    )
    return gate_step(spec, params)


def test_an_engine_on_the_same_weights_passes():
    policy = model(0)
    engine = NativeEngine(policy, max_slots=4)
    found = logprob_gate(engine, policy, step(), bound=BOUND)
    assert list(found) == ["text", "image", "video"]
    assert max(found.values()) <= BOUND
    assert engine.finished


def test_an_engine_on_other_weights_is_refused():
    engine = NativeEngine(model(1), max_slots=4)
    with pytest.raises(LogprobGateFailed, match=r"text .* image .* video") as refused:
        logprob_gate(engine, model(0), step(), bound=BOUND)
    assert refused.value.data["bound"] == BOUND
    assert engine.finished


def test_values_that_are_no_numbers_do_not_pass():
    policy = model(0)
    broken = model(0)
    with torch.no_grad():
        next(iter(broken.head.parameters())).fill_(float("nan"))
    with pytest.raises(LogprobGateFailed):
        logprob_gate(NativeEngine(policy, max_slots=4), broken, step(), bound=BOUND)
