"""The device decoder against the plain decode path, with Triton's interpreter in place of a GPU."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from common.rl.sampling import SamplingParams, sample, score
from common.vlm.bound import bound_model
from common.vlm.decode import decode_rows, start_groups
from common.vlm.decode_pool import DecodePool
from common.vlm.model import SplitModel
from common.vlm.tiny import tiny_config, tiny_prompt

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1 from the start of the process",
)

SAMPLES, NEW = 3, 4
PARAMS = SamplingParams(
    max_new_tokens=NEW, stop_token_ids=(0,), temperature=0.8, suppressed_token_ids=(3, 4)
)


def make_pool(config, response_tokens):
    return DecodePool(
        config,
        groups=3,
        samples=SAMPLES,
        prefix_tokens=40,
        response_tokens=response_tokens,
        dtype=torch.float32,
        device="cpu",
    )


def make_decoder(model, params=PARAMS, *, forced=False):
    from common.vlm.cuda.decode_parts import Cuts
    from common.vlm.cuda.decode_sampling import Choice
    from common.vlm.cuda.decoder import CudaDecoder

    pool = make_pool(model.config, NEW)
    choice = Choice(
        temperature=params.temperature,
        forced=forced,
        stops=torch.tensor(params.stop_token_ids, dtype=torch.int32),
        suppressed=torch.tensor(params.suppressed_token_ids, dtype=torch.int32),
        limits=torch.zeros(9, dtype=torch.int32),
    )
    return CudaDecoder(
        model,
        pool,
        choice,
        cuts=dataclasses.replace(Cuts.of(rows=8), items=5, early=False),
        positions=256,
    )


@pytest.fixture
def model():
    bound = bound_model(tiny_config(), dtype=torch.float32, train_vision=False)
    return SplitModel(bound.model)


def prompts(model, sizes=(7, 30)):
    return [tiny_prompt(model.config, text_tokens=n, seed=n) for n in sizes]


def admit(model, pool, prompt):
    empty = torch.zeros((0, 64))
    with torch.no_grad():
        return pool.admit(
            model.prefix_kv(prompt, empty),
            last_token=int(prompt.token_ids[-1]),
            start_position=prompt.start_position,
        )


def plain_logits(model, recorded):
    """[groups, SAMPLES, NEW, C] of the plain path when these tokens are fed."""
    pool = make_pool(model.config, NEW - 1)
    slots = [admit(model, pool, prompt) for prompt in prompts(model)]
    steps = [start_groups(model, pool, slots).repeat_interleave(SAMPLES, dim=0)]
    rows = [(slot, lane) for slot in slots for lane in range(SAMPLES)]
    for number in range(NEW - 1):
        fed = recorded[:, :, number].reshape(-1)
        steps.append(decode_rows(model, pool, [r[0] for r in rows], [r[1] for r in rows], fed))
    return torch.stack(steps, dim=1).view(len(slots), SAMPLES, NEW, -1)


def started(decoder, model, limits=(NEW,) * SAMPLES):
    slots = []
    for prompt in prompts(model):
        slot = admit(model, decoder.pool, prompt)
        decoder.start(
            slot,
            last_token=int(prompt.token_ids[-1]),
            start_position=prompt.start_position,
            limits=limits,
        )
        slots.append(slot)
    return slots


def test_forced_logprobs_equal_the_plain_path(model):
    recorded = torch.randint(8, 200, (2, SAMPLES, NEW), generator=torch.Generator().manual_seed(3))
    decoder = make_decoder(model, forced=True)
    slots = started(decoder, model)
    decoder.lanes.recorded[: 2 * SAMPLES] = recorded.view(-1, NEW)
    decoder.set_rows([(s, lane) for s in slots for lane in range(SAMPLES)], bucket=8)
    finished = [decoder.step(8).finished() for _ in range(NEW)]
    logits = plain_logits(model, recorded)
    expected = score(logits.view(-1, logits.shape[-1]), recorded.view(-1), PARAMS)
    actual = decoder.lanes.logprobs[: 2 * SAMPLES].view(-1)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)
    assert finished[-2] == []
    assert len(finished[-1]) == 2 * SAMPLES


@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_sampled_tokens_equal_the_plain_sampler(model, temperature):
    params = SamplingParams(
        max_new_tokens=NEW,
        stop_token_ids=(0,),
        temperature=temperature,
        suppressed_token_ids=(3, 4),
    )
    decoder = make_decoder(model, params)
    slots = started(decoder, model)
    uniforms = torch.rand(9, NEW, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    decoder.lanes.uniforms.copy_(uniforms)
    decoder.set_rows([(s, lane) for s in slots for lane in range(SAMPLES)], bucket=6)
    for _ in range(NEW):
        decoder.step(6)
    tokens = decoder.lanes.chosen[: 2 * SAMPLES].view(2, SAMPLES, NEW).to(torch.int64)
    logits = plain_logits(model, tokens)
    expected, logprobs = sample(
        logits.view(-1, logits.shape[-1]), uniforms[: 2 * SAMPLES].view(-1), params
    )
    for row in range(2 * SAMPLES):
        length = int(decoder.lanes.tokens[row])
        part = slice(row * NEW, row * NEW + length)
        assert tokens.view(-1)[part].tolist() == expected[part].tolist()
        torch.testing.assert_close(
            decoder.lanes.logprobs[row, :length], logprobs[part].float(), rtol=1e-4, atol=1e-5
        )


def test_rows_may_be_dropped_and_end_at_their_limits(model):
    recorded = torch.randint(8, 200, (2, SAMPLES, NEW), generator=torch.Generator().manual_seed(4))
    decoder = make_decoder(model, forced=True)
    slots = started(decoder, model, limits=(1, 2, NEW))
    decoder.lanes.recorded[: 2 * SAMPLES] = recorded.view(-1, NEW)
    rows = [(s, lane) for s in slots for lane in range(SAMPLES)]
    lengths = dict.fromkeys(rows, NEW)
    for number in range(NEW):
        decoder.set_rows(rows, bucket=6)
        over = decoder.step(6).finished()
        lengths |= dict.fromkeys(over, number + 1)
        rows = [row for row in rows if row not in over]
    assert rows == []
    assert [lengths[slots[0], lane] for lane in range(SAMPLES)] == [1, 2, NEW]
    logits = plain_logits(model, recorded)
    for group, slot in enumerate(slots):
        expected = score(logits[group, 2], recorded[group, 2], PARAMS)
        actual = decoder.lanes.logprobs[slot * SAMPLES + 2]
        torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)
