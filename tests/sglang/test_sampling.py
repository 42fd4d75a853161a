"""What SGLang samples, against the pass that trains."""

from __future__ import annotations

import pytest
import torch

from common.vlm.tiny import tiny_prompt
from tests.sglang.policy import SAMPLES, run_step

pytestmark = pytest.mark.sglang

BOUND = 2e-5
PROMPTS = {
    "text": {},
    "image": {"images": [(1, 4, 4)]},
    "two images": {"images": [(1, 4, 4), (1, 8, 4)]},
    "video": {"videos": [(3, 4, 4)], "seconds_per_grid": 0.6},
    "image and video": {"images": [(1, 4, 4)], "videos": [(2, 4, 8)], "seconds_per_grid": 1.5},
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_logprobs_are_those_of_the_trainer(aliased, kind):
    prompt = tiny_prompt(aliased.policy.config, seed=1, **PROMPTS[kind])
    spec = aliased.policy.spec(temperature=0.7)
    (finished,) = run_step(aliased.engine, spec, [aliased.policy.request(0, prompt)])
    assert finished.lengths.tolist() == [6] * SAMPLES
    trainer = aliased.policy.logprobs(prompt, finished, spec)
    assert (finished.logprobs - trainer).abs().max() < BOUND
    assert not torch.isin(finished.tokens, torch.tensor(spec.params.suppressed_token_ids)).any()
