"""The engine on the device decoder: its graphs, its numbers and its memory."""

from __future__ import annotations

import gc

import pytest
import torch

from common.rl.sampling import SamplingParams
from common.vlm.bound import bound_model
from common.vlm.kernels import split_model
from common.vlm.tiny import tiny_config, tiny_prompt
from services.rollout.engines.native import NativeEngine
from services.rollout.engines.protocol import GroupRequest, RecordedResponses, StepSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SAMPLES = 6
PARAMS = SamplingParams(
    max_new_tokens=60,
    stop_token_ids=tuple(range(8, 14)),
    temperature=0.9,
    suppressed_token_ids=(3, 4),
)


@pytest.fixture(scope="module")
def bound():
    config = tiny_config(hidden_size=256, heads=4, kv_heads=2, layers=3, intermediate_size=352)
    return bound_model(config, dtype=torch.bfloat16, train_vision=False, device="cuda", std=0.05)


def prompts(config):
    sizes = (300, 1, 90, 31, 700)
    return [tiny_prompt(config, text_tokens=n, seed=n).to("cuda") for n in sizes]


def begin(bound, kernels, *, max_slots, recorded=None, params=PARAMS):
    """An engine with all groups of a step added."""
    engine = NativeEngine(split_model(bound.model, kernels), max_slots=max_slots)
    requests = [
        GroupRequest(
            group=group, prompt=prompt, recorded=None if recorded is None else recorded[group]
        )
        for group, prompt in enumerate(prompts(bound.model.config))
    ]
    engine.begin_step(
        StepSpec(
            step=4,
            weights_version=4,
            seed=77,
            groups=tuple(range(len(requests))),
            samples_per_group=SAMPLES,
            params=params,
            forced=recorded is not None,
        )
    )
    for request in requests:
        engine.add_group(request)
    return engine


def decode(bound, kernels, **options):
    engine = begin(bound, kernels, **options)
    iterations = []
    while not engine.finished:
        while engine.admit_next() is not None:
            pass
        iterations.append(engine.run_iteration())
    engine.release()
    return iterations


def finished(iterations):
    return {group.group: group for iteration in iterations for group in iteration.finished}


def test_kernels_follow_the_dtype_and_the_recipe(bound):
    assert split_model(bound.model, "auto").fused
    assert not split_model(bound.model, "plain").fused
    config = tiny_config()
    exact = bound_model(config, dtype=torch.float32, train_vision=False, device="cuda")
    assert not split_model(exact.model, "auto").fused


@pytest.mark.parametrize("max_slots", [2 * SAMPLES, 100])
def test_numbers_are_those_of_plain_operations(bound, max_slots):
    sampled = decode(bound, "auto", max_slots=max_slots)
    groups = finished(sampled)
    recorded = [
        RecordedResponses(tokens=groups[number].tokens, lengths=groups[number].lengths)
        for number in sorted(groups)
    ]
    for kernels in ("auto", "plain"):
        again = decode(bound, kernels, max_slots=max_slots, recorded=recorded)
        assert [(i.number, i.rows) for i in again] == [(i.number, i.rows) for i in sampled]
        for one, other in zip(sampled, again, strict=True):
            assert [g.group for g in one.finished] == [g.group for g in other.finished]
        for number, group in finished(again).items():
            assert group.decode_iteration == groups[number].decode_iteration
            assert group.tokens.equal(groups[number].tokens)
            difference = (group.logprobs - groups[number].logprobs).abs()
            assert float(difference.mean()) < 0.01, kernels
    lengths = {int(n) for group in groups.values() for n in group.lengths}
    assert len(lengths) > 3, "responses of one length show nothing"


def test_the_same_step_gives_the_same_bits(bound):
    first = finished(decode(bound, "auto", max_slots=100))
    second = finished(decode(bound, "auto", max_slots=100))
    for number, group in first.items():
        assert group.tokens.equal(second[number].tokens)
        assert group.logprobs.equal(second[number].logprobs)


@pytest.mark.parametrize("iterations", [0, 1, 5])
def test_abort_under_a_running_graph_gives_the_memory_back(bound, iterations):
    decode(bound, "auto", max_slots=100)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine = begin(bound, "auto", max_slots=100)
    while engine.admit_next() is not None:
        pass
    for _ in range(iterations):
        engine.run_iteration()
    assert engine.memory_bytes > 0
    engine.abort()
    gc.collect()
    assert engine.memory_bytes == 0
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    assert finished(decode(bound, "auto", max_slots=100))
