"""The split pass and the decode kernels equal the unmodified library model."""

from __future__ import annotations

import pytest
import torch

from common.vlm.bound import bound_model
from common.vlm.tiny import tiny_config
from common.vlm.verification import (
    decode_vs_monolithic,
    monolithic_logits,
    split_vs_monolithic,
)
from common.vlm.verification_cases import CASES, all_cases, make_case

GRADIENT_LIMIT = 1e-12
LOGPROB_LIMIT = 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("train_vision", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_in_float64(name, train_vision, checkpointing):
    bound = bound_model(tiny_config(), dtype=torch.float64, train_vision=train_vision)
    report = split_vs_monolithic(
        bound,
        [make_case(bound.model.config, **CASES[name])],
        checkpointing=checkpointing,
        temperature=0.7,
        logit_chunk_tokens=4,
    )
    assert report.max_rel_grad_diff < GRADIENT_LIMIT, report
    assert report.max_logprob_diff < GRADIENT_LIMIT, report


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_a_batch_add_up(tied):
    config = tiny_config(tie_word_embeddings=tied, layers=3, heads=4, kv_heads=1)
    bound = bound_model(config, dtype=torch.float64, train_vision=True)
    report = split_vs_monolithic(bound, all_cases(config))
    assert report.max_rel_grad_diff < GRADIENT_LIMIT, report


def test_a_wrong_weight_is_seen():
    bound = bound_model(tiny_config(), dtype=torch.float64, train_vision=True)
    case = make_case(bound.model.config, (5, 3), images=[(1, 6, 8)])
    rotary = bound.model.model.language_model.rotary_emb
    hooked = []

    def shift(module, args):
        # only the packed row has eight tokens: its positions are made wrong
        if args[1].shape[-1] == 8:
            hooked.append(True)
            return args[0], args[1] + torch.tensor([1, 0, 0])[:, None, None]
        return None

    with rotary.register_forward_pre_hook(shift):
        report = split_vs_monolithic(bound, [case])
    assert hooked
    assert report.max_rel_grad_diff > 1e-6


@pytest.mark.parametrize("train_vision", [False, True])
def test_logprobs_equal_in_float32(train_vision):
    config = tiny_config()
    bound = bound_model(config, dtype=torch.float32, train_vision=train_vision)
    for case in all_cases(config):
        assert split_vs_monolithic(bound, [case]).max_logprob_diff < LOGPROB_LIMIT


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_decode_equals_in_float32(kv_heads):
    config = tiny_config(kv_heads=kv_heads)
    bound = bound_model(config, dtype=torch.float32, train_vision=False)
    assert decode_vs_monolithic(bound, all_cases(config)) < LOGPROB_LIMIT


def test_positions_left_to_the_library_give_the_same_logits():
    config = tiny_config()
    bound = bound_model(config, dtype=torch.float32, train_vision=False)
    case = make_case(config, (6,), images=[(1, 6, 8)])
    prompt, response = case.prompt, case.responses[0]
    ids = torch.cat((prompt.token_ids, response))
    types = torch.cat((prompt.mm_token_type_ids, torch.zeros_like(response)))
    with torch.no_grad():
        ours = monolithic_logits(bound.model, prompt, response)
        theirs = bound.model(
            input_ids=ids[None],
            mm_token_type_ids=types[None],
            pixel_values=prompt.pixel_values,
            image_grid_thw=prompt.image_grid_thw,
        ).logits[0, prompt.prefix_tokens : -1]
    assert torch.equal(ours, theirs)
