"""The engine on the device decoder and on plain operations, with Triton's interpreter."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from common.rl.sampling import SamplingParams
from common.vlm.bound import bound_model
from common.vlm.model import SplitModel
from common.vlm.tiny import tiny_config, tiny_prompt
from services.rollout.engines.native import NativeEngine
from services.rollout.engines.protocol import GroupRequest, RecordedResponses, StepSpec

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1 from the start of the process",
)

CONFIG = tiny_config(vocab_size=40, hidden_size=32, intermediate_size=48)
SAMPLES = 2
PROMPTS = tuple(
    tiny_prompt(CONFIG, text_tokens=count, seed=number) for number, count in enumerate((3, 1, 40))
)
"""One token is an empty prefix."""
PARAMS = SamplingParams(
    max_new_tokens=5, stop_token_ids=tuple(range(8, 14)), temperature=0.8, suppressed_token_ids=(3,)
)


@pytest.fixture(scope="module")
def models():
    """The same weights behind plain and behind fused kernels."""
    from common.vlm.cuda.fused import FusedSteps
    from common.vlm.vision import PlainBlocks

    bound = bound_model(CONFIG, dtype=torch.float32, train_vision=False, std=0.3)
    fused = SplitModel(bound.model, steps=FusedSteps(vision=PlainBlocks()))
    return SplitModel(bound.model), fused


def decode(model, *, max_slots, params=PARAMS, recorded=None, dropped=None):
    """All iterations of a step; `dropped` is a group that goes after the first one."""
    engine = NativeEngine(model, max_slots=max_slots)
    engine.begin_step(
        StepSpec(
            step=4,
            weights_version=4,
            seed=77,
            groups=tuple(range(len(PROMPTS))),
            samples_per_group=SAMPLES,
            params=params,
            forced=recorded is not None,
        )
    )
    for group, prompt in enumerate(PROMPTS):
        given = None if recorded is None else recorded[group]
        engine.add_group(GroupRequest(group=group, prompt=prompt, recorded=given))
    iterations = []
    while not engine.finished:
        while engine.admit_next() is not None:
            pass
        iterations.append(engine.run_iteration())
        if dropped is not None and len(iterations) == 1:
            engine.drop_group(dropped)
    assert engine.memory_bytes > 0
    engine.release()
    assert engine.memory_bytes == 0
    return iterations


def require_equal(first, second):
    """Same numbers, rows, groups and tokens, and nearly the same log-probabilities."""
    assert [(i.number, i.rows) for i in first] == [(i.number, i.rows) for i in second]
    for one, other in zip(first, second, strict=True):
        assert [g.group for g in one.finished] == [g.group for g in other.finished]
        for expected, actual in zip(one.finished, other.finished, strict=True):
            assert actual.tokens.equal(expected.tokens)
            assert actual.lengths.equal(expected.lengths)
            assert actual.finish_reasons.equal(expected.finish_reasons)
            assert actual.decode_iteration == expected.decode_iteration
            torch.testing.assert_close(actual.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("max_slots", [SAMPLES, 100])
def test_gives_the_same_whether_groups_wait_for_a_place_or_not(models, max_slots):
    plain, fused = models
    expected = decode(plain, max_slots=max_slots)
    require_equal(expected, decode(fused, max_slots=max_slots))
    lengths = {int(n) for i in expected for g in i.finished for n in g.lengths}
    assert len(lengths) > 1, "responses of one length show nothing"


def test_replay_goes_by_recorded_lengths(models):
    plain, fused = models
    tokens = torch.tensor([9, 20, 21])
    recorded = [
        RecordedResponses(tokens=tokens, lengths=torch.tensor(lengths))
        for lengths in ([0, 3], [2, 1], [3, 0])
    ]
    recorded[2] = RecordedResponses(tokens=tokens[:0], lengths=torch.tensor([0, 0]))
    require_equal(
        decode(plain, max_slots=100, recorded=recorded),
        decode(fused, max_slots=100, recorded=recorded),
    )


@pytest.mark.parametrize("max_slots", [2 * SAMPLES, 100])
def test_a_group_dropped_while_the_next_step_runs_changes_no_other(models, max_slots):
    plain, fused = models
    require_equal(
        decode(plain, max_slots=max_slots, dropped=1),
        decode(fused, max_slots=max_slots, dropped=1),
    )


@pytest.mark.parametrize("changes", [{"top_k": 2}, {"top_p": 0.5}, {"min_new_tokens": 3}])
def test_other_ways_of_sampling_fall_back_to_plain_operations(models, changes):
    plain, fused = models
    params = dataclasses.replace(PARAMS, **changes)
    require_equal(
        decode(plain, max_slots=100, params=params), decode(fused, max_slots=100, params=params)
    )


def test_abort_while_the_next_step_runs(models):
    _, fused = models
    engine = NativeEngine(fused, max_slots=100)
    spec = StepSpec(
        step=4, weights_version=4, seed=77, groups=(0, 1), samples_per_group=SAMPLES, params=PARAMS
    )
    engine.begin_step(spec)
    for group in (0, 1):
        engine.add_group(GroupRequest(group=group, prompt=PROMPTS[group]))
        assert engine.admit_next() == group
    assert engine.run_iteration().rows == 2 * SAMPLES
    engine.abort()
    assert engine.finished
    assert engine.memory_bytes == 0
    engine.begin_step(spec)
