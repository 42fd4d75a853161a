"""The device decoder, its graphs included, against the plain decode path."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from common.rl.sampling import SamplingParams, score
from common.vlm.bound import bound_model
from common.vlm.decode import decode_rows, start_groups
from common.vlm.decode_pool import DecodePool
from common.vlm.model import SplitModel
from common.vlm.tiny import tiny_config, tiny_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SAMPLES, NEW, GROUPS = 4, 70, 3
PARAMS = SamplingParams(
    max_new_tokens=NEW, stop_token_ids=(), temperature=0.8, suppressed_token_ids=(3, 4)
)
PROMPT_TOKENS = (300, 1, 90)


@pytest.fixture(scope="module")
def model():
    config = tiny_config(hidden_size=256, heads=4, kv_heads=2, layers=3, intermediate_size=352)
    made = bound_model(config, dtype=torch.bfloat16, train_vision=False, device="cuda", std=0.05)
    return SplitModel(made.model)


def make_pool(model, response_tokens):
    return DecodePool(
        model.config,
        groups=GROUPS,
        samples=SAMPLES,
        prefix_tokens=320,
        response_tokens=response_tokens,
        dtype=model.dtype,
        device="cuda",
        kv_heads=model.kv_heads,
    )


def admit(model, pool, prompt):
    empty = torch.zeros((0, 256), device="cuda", dtype=model.dtype)
    with torch.no_grad():
        return pool.admit(
            model.prefix_kv(prompt, empty),
            last_token=int(prompt.token_ids[-1]),
            start_position=prompt.start_position,
        )


def prompts(model):
    return [tiny_prompt(model.config, text_tokens=n, seed=n).to("cuda") for n in PROMPT_TOKENS]


def decoder_of(model, *, forced, early=False):
    from common.vlm.cuda.decode_parts import Cuts
    from common.vlm.cuda.decode_sampling import Choice
    from common.vlm.cuda.decoder import CudaDecoder

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    choice = Choice(
        temperature=PARAMS.temperature,
        forced=forced,
        stops=ints(),
        suppressed=ints(3, 4),
        limits=torch.zeros(GROUPS * SAMPLES, dtype=torch.int32, device="cuda"),
    )
    decoder = CudaDecoder(
        model,
        make_pool(model, NEW),
        choice,
        cuts=dataclasses.replace(Cuts.of(rows=16), items=9, early=early),
        positions=512,
    )
    for prompt in prompts(model):
        decoder.start(
            admit(model, decoder.pool, prompt),
            last_token=int(prompt.token_ids[-1]),
            start_position=prompt.start_position,
            limits=[NEW] * SAMPLES,
        )
    return decoder


def plain_logprobs(model, recorded):
    pool = make_pool(model, NEW - 1)
    slots = [admit(model, pool, prompt) for prompt in prompts(model)]
    steps = [start_groups(model, pool, slots).repeat_interleave(SAMPLES, dim=0)]
    rows = [(slot, lane) for slot in slots for lane in range(SAMPLES)]
    for number in range(NEW - 1):
        fed = recorded[:, number].to(torch.int64)
        steps.append(decode_rows(model, pool, [r[0] for r in rows], [r[1] for r in rows], fed))
    logits = torch.stack(steps, dim=1)
    flat = logits.view(-1, logits.shape[-1])
    return score(flat, recorded.reshape(-1).to(torch.int64), PARAMS).view(recorded.shape)


@pytest.mark.parametrize("graph", [False, True])
def test_forced_logprobs_equal_the_plain_path(model, graph):
    generator = torch.Generator().manual_seed(3)
    recorded = torch.randint(8, 200, (GROUPS * SAMPLES, NEW), generator=generator).cuda()
    decoder = decoder_of(model, forced=True)
    decoder.lanes.recorded.copy_(recorded)
    rows = [(slot, lane) for slot in range(GROUPS) for lane in range(SAMPLES)]
    decoder.set_rows(rows, bucket=16)
    if graph:
        decoder.capture(16)
    finished = [decoder.step(16) for _ in range(NEW)]
    assert finished[-2].finished() == []
    assert finished[-1].finished() == rows
    expected = plain_logprobs(model, recorded)
    difference = (decoder.lanes.logprobs - expected).abs()
    assert float(difference.mean()) < 0.01
    assert float(difference.max()) < 0.1


@pytest.mark.parametrize("early", [False, True])
def test_graph_equals_launches(model, early):
    results = []
    for graph in (False, True):
        decoder = decoder_of(model, forced=False, early=early and graph)
        generator = torch.Generator(device="cuda").manual_seed(7)
        decoder.lanes.uniforms.uniform_(generator=generator)
        rows = [(slot, lane) for slot in range(GROUPS) for lane in range(SAMPLES)]
        decoder.set_rows(rows, bucket=12)
        if graph:
            decoder.capture(12)
        for number in range(NEW):
            if number == 20:
                rows = rows[:3] + rows[6:]
                decoder.set_rows(rows, bucket=12)
            decoder.step(12)
        torch.cuda.synchronize()
        results.append((decoder.lanes.chosen.clone(), decoder.lanes.logprobs.clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.isin(results[0][0][0], torch.tensor([3, 4], device="cuda")).any()


@pytest.mark.parametrize("rows", [16, 64])
def test_steps_beside_others_give_the_same_bits(rows):
    from common.vlm.cuda.decode_linear import gated_linear, linear, splits
    from common.vlm.cuda.decode_parts import Cuts

    alone, beside = (Cuts.of(rows=rows, beside=beside) for beside in (False, True))
    assert (alone.attention, alone.items) == (beside.attention, beside.items)
    generator = torch.Generator(device="cuda").manual_seed(1)
    for role, width, inner in (("qkv", 2560, 2048), ("down", 2048, 11008), ("gate_up", 1408, 2048)):
        x, weight = (
            torch.randn(shape, generator=generator, device="cuda").bfloat16()
            for shape in ((rows, inner), (width, inner))
        )
        run, columns = (gated_linear, width // 2) if role == "gate_up" else (linear, width)
        results = []
        for cuts in (alone, beside):
            tiles = getattr(cuts, role)
            out = torch.empty(splits(tiles), rows, columns, device="cuda")
            run(x, weight, out, tiles)
            results.append(out)
        assert torch.equal(*results), role


def test_sampled_frequencies_follow_the_distribution():
    from common.vlm.cuda.decode_sampling import Choice, ChunkFacts, Lanes, choose

    rows, columns = 4096, 9000
    device = torch.device("cuda")
    logits = torch.zeros(rows, columns, device=device, dtype=torch.bfloat16)
    logits[:, 5000:] = -40
    logits[:, 17] = 7.0
    lane = torch.arange(rows, dtype=torch.int32, device=device)
    lanes = Lanes.make(lanes=rows, new_tokens=1, device=device)
    lanes.uniforms.copy_(((torch.arange(rows, device=device) + 0.5) / rows)[:, None])
    choice = Choice(
        temperature=1.0,
        forced=False,
        stops=lane[:0],
        suppressed=torch.tensor([3], dtype=torch.int32, device=device),
        limits=torch.ones_like(lane),
    )
    facts = ChunkFacts.make(rows=rows, vocabulary=columns, device=device)
    choose(logits, lane, lanes, choice, facts)
    weight = float(torch.tensor(7.0).exp())
    expected = weight / (weight + 4998)
    chosen = lanes.chosen[:, 0]
    assert float((chosen == 17).float().mean()) == pytest.approx(expected, abs=2 / rows)
    assert int((chosen == 3).sum()) == 0
    assert int(chosen.max()) < 5000
    assert bool((chosen.diff() >= 0).all())
    assert bool((lanes.finished == 1).all())
