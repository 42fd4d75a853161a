"""SGLang's draws are those of the native engine, row by row.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch

from common.rl.philox import uniforms
from common.rl.sampling import SamplingParams, sample
from services.rollout.engines.sglang.drawing import Draws, draw

ROWS = [(0, 0), (0, 1), (4, 0), (4, 1)]
"""Group and number of the response."""
PROMPT_TOKENS = (7, 7, 30, 30)
INDICES = (0, 3, 1, 11)
"""Of the tokens that are drawn, in their responses."""


def draws(**params) -> list[Draws]:
    params = {"temperature": 0.8, "top_p": 1.0, "top_k": 0} | params
    return [
        Draws(
            seed=2**62 + 5,
            step=3,
            group=group,
            sample=sample,
            prompt_tokens=prompt_tokens,
            **params,
        )
        for (group, sample), prompt_tokens in zip(ROWS, PROMPT_TOKENS, strict=True)
    ]


@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.7}, {"top_k": 4}, {"temperature": 0.0}], ids=str
)
def test_a_row_is_what_the_native_engine_samples(params):
    logits_RV = torch.randn((4, 50), generator=torch.Generator().manual_seed(0))
    logits_RV[:, 9] = float("-inf")
    # of the newest token in its sequence: the prompt's last one, before a response has any
    positions_R = torch.tensor(PROMPT_TOKENS) - 1 + torch.tensor(INDICES)
    tokens_R, logprobs_R = draw(logits_RV, draws(**params), positions_R.to(torch.int32))
    wanted = {"temperature": 0.8, "top_p": 1.0, "top_k": 0} | params
    native = SamplingParams(
        max_new_tokens=20, stop_token_ids=(), suppressed_token_ids=(9,), **wanted
    )
    numbers = torch.tensor(ROWS).T
    uniforms_R = uniforms(2**62 + 5, 3, numbers[0], numbers[1], torch.tensor(INDICES))
    expected = sample(logits_RV, uniforms_R, native)
    assert torch.equal(tokens_R, expected[0])
    assert torch.equal(logprobs_R, expected[1])


def test_a_row_does_not_depend_on_the_others():
    logits_RV = torch.randn((4, 50), generator=torch.Generator().manual_seed(1))
    positions_R = torch.tensor([40, 41, 42, 43])
    tokens_R, _ = draw(logits_RV, draws(), positions_R)
    alone, _ = draw(logits_RV[2:3], draws()[2:3], positions_R[2:3])
    assert torch.equal(alone, tokens_R[2:3])


def test_draws_travel_with_what_sglang_adds_to_them():
    (first, *_) = draws()
    assert Draws.of({**first.to_json(), "__req__": object()}) == first
