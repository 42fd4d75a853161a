from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from common.rl.philox import uniforms
from common.rl.sampling import SamplingParams, sample
from common.vlm.bound import bound_model
from common.vlm.loading import suppressed_token_ids
from common.vlm.model import SplitModel
from common.vlm.precision import KeepFloat64
from common.vlm.prefix import PrefixKV, packed_shape
from common.vlm.tiny import tiny_config, tiny_prompt
from common.vlm.verification import monolithic_logits
from services.rollout.engines.errors import (
    EngineStateInvalid,
    GroupRequestInvalid,
    NonFiniteLogits,
)
from services.rollout.engines.native import NativeEngine
from services.rollout.engines.protocol import (
    FinishReason,
    GroupRequest,
    RecordedResponses,
    StepSpec,
)

CONFIG = tiny_config(vocab_size=40, hidden_size=32, intermediate_size=48)
SUPPRESSED = suppressed_token_ids(CONFIG)
STOPS = tuple(range(8, 14))
SAMPLES = 3
PROMPTS = (
    tiny_prompt(CONFIG, text_tokens=3, images=((1, 4, 4),), seed=1),
    tiny_prompt(CONFIG, text_tokens=1, seed=2),
    tiny_prompt(CONFIG, text_tokens=90, seed=3),
    tiny_prompt(CONFIG, text_tokens=2, videos=((2, 4, 4),), seed=4),
    tiny_prompt(CONFIG, text_tokens=5, seed=5),
)
"""An image; one token, so an empty prefix; a long text; a video; a text."""
PARAMS = SamplingParams(
    max_new_tokens=6, stop_token_ids=STOPS, temperature=0.8, suppressed_token_ids=SUPPRESSED
)


@pytest.fixture(scope="module")
def bound():
    return bound_model(CONFIG, dtype=torch.float64, train_vision=False, std=0.3)


@pytest.fixture(scope="module")
def model(bound):
    return SplitModel(bound.model)


def spec(**changes):
    values = {
        "step": 4,
        "weights_version": 4,
        "seed": 77,
        "groups": tuple(range(len(PROMPTS))),
        "samples_per_group": SAMPLES,
        "params": PARAMS,
    }
    return StepSpec(**{**values, **changes})


@torch.no_grad()
def requests(model, recorded=None):
    return [
        GroupRequest(
            group=group,
            prompt=prompt,
            vision=model.vision_embeddings(prompt),
            recorded=None if recorded is None else recorded[group],
        )
        for group, prompt in enumerate(PROMPTS)
    ]


def decode(engine, step, ready):
    """Run a step whose groups become ready one at a time, whenever the engine waits."""
    ready = list(ready)
    engine.begin_step(step)
    iterations = []
    while not engine.finished:
        while engine.admit_next() is not None:
            pass
        if engine.needs_next_group():
            engine.add_group(ready.pop(0))
        else:
            iterations.append(engine.run_iteration())
    return iterations


def finished(iterations):
    return {group.group: group for iteration in iterations for group in iteration.finished}


def same(first, second):
    return all(
        torch.equal(getattr(first, name), getattr(second, name))
        for name in ("tokens", "lengths", "logprobs", "finish_reasons")
    )


@pytest.fixture(scope="module")
def naive(bound):
    """Responses of all groups from one library forward a token."""
    groups = {}
    with torch.no_grad(), KeepFloat64():
        for group, prompt in enumerate(PROMPTS):
            responses = [_naive_response(bound.model, prompt, group, i) for i in range(SAMPLES)]
            groups[group] = responses
    return groups


def _naive_response(model, prompt, group, index):
    tokens, logprobs = [], []
    while len(tokens) < PARAMS.max_new_tokens and not (tokens and tokens[-1] in STOPS):
        logits = monolithic_logits(model, prompt, torch.tensor([*tokens, STOPS[0]]))[-1:]
        where = [torch.tensor([i]) for i in (group, index, len(tokens))]
        token, logprob = sample(logits, uniforms(77, 4, *where), PARAMS)
        tokens.append(int(token))
        logprobs.append(float(logprob))
    return tokens, logprobs


@pytest.mark.parametrize("max_slots", [SAMPLES, 2 * SAMPLES + 1, 100])
def test_equals_a_library_forward_per_token_whatever_the_number_of_slots(model, naive, max_slots):
    engine = NativeEngine(model, max_slots=max_slots)
    with KeepFloat64():
        results = finished(decode(engine, spec(), requests(model)))
    assert sorted(results) == sorted(naive)
    reasons = set()
    for group, responses in naive.items():
        result = results[group]
        assert result.tokens.tolist() == [t for tokens, _ in responses for t in tokens]
        assert result.lengths.tolist() == [len(tokens) for tokens, _ in responses]
        expected = torch.tensor([p for _, logprobs in responses for p in logprobs])
        assert torch.allclose(result.logprobs, expected, atol=1e-6, rtol=0)
        for (tokens, _), reason in zip(responses, result.finish_reasons.tolist(), strict=True):
            assert reason == (FinishReason.STOP if tokens[-1] in STOPS else FinishReason.LENGTH)
            reasons.add(reason)
        assert not set(result.tokens.tolist()) & set(SUPPRESSED)
        assert result.weights_version == 4
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_the_order_in_which_groups_become_ready_changes_nothing(model):
    in_order = decode(NativeEngine(model, max_slots=6), spec(), requests(model))
    engine = NativeEngine(model, max_slots=6)
    engine.begin_step(spec())
    for request in reversed(requests(model)):
        engine.add_group(request)
    iterations = []
    while not engine.finished:
        while engine.admit_next() is not None:
            pass
        iterations.append(engine.run_iteration())
    assert [iteration.rows for iteration in iterations] == [i.rows for i in in_order]
    for first, second in zip(in_order, iterations, strict=True):
        assert [g.group for g in first.finished] == [g.group for g in second.finished]
        assert all(map(same, first.finished, second.finished))


def test_prefixes_from_leases_give_the_same_bits_as_the_engines_own_prefill(model):
    own = finished(decode(NativeEngine(model, max_slots=100), spec(), requests(model)))
    leased = []
    for request in requests(model):
        buffer = torch.zeros(packed_shape(CONFIG, request.prompt.prefix_tokens), dtype=model.dtype)
        model.prefix_kv(request.prompt, request.vision).pack(buffer)
        leased.append(dataclasses.replace(request, prefix=PrefixKV.unpack(buffer), vision=None))
    results = finished(decode(NativeEngine(model, max_slots=100), spec(), leased))
    assert all(same(own[group], results[group]) for group in own)


def test_the_engine_waits_for_the_next_group_while_a_place_is_free(model):
    engine = NativeEngine(model, max_slots=2 * SAMPLES)
    engine.begin_step(spec(groups=(0, 1, 2)))
    assert engine.capacity == 2
    first, second, third = requests(model)[:3]
    assert engine.needs_next_group()
    engine.add_group(first)
    assert not engine.needs_next_group()
    with pytest.raises(EngineStateInvalid, match="group 0 has to be admitted first"):
        engine.run_iteration()
    assert engine.admit_next() == 0
    assert engine.needs_next_group()
    engine.add_group(third)
    assert engine.needs_next_group()
    assert engine.admit_next() is None
    with pytest.raises(EngineStateInvalid, match="group 1 has to be admitted first"):
        engine.run_iteration()
    engine.add_group(second)
    assert engine.admit_next() == 1
    assert not engine.needs_next_group()
    assert engine.admit_next() is None
    assert engine.active_rows == 2 * SAMPLES
    assert engine.run_iteration().rows == 2 * SAMPLES


def test_a_dropped_group_leaves_the_results_of_the_others(model):
    whole = finished(decode(NativeEngine(model, max_slots=6), spec(), requests(model)))
    engine = NativeEngine(model, max_slots=6)
    engine.begin_step(spec())
    engine.drop_group(1)
    ready = [request for request in requests(model) if request.group != 1]
    for request in ready:
        engine.add_group(request)
    results = {}
    while not engine.finished:
        while engine.admit_next() is not None:
            pass
        results |= finished([engine.run_iteration()])
    assert sorted(results) == [0, 2, 3, 4]
    assert all(results[group].tokens.equal(whole[group].tokens) for group in results)


@pytest.mark.parametrize("iterations", [0, 1, 2])
def test_a_group_can_be_dropped_while_it_waits_or_decodes(model, iterations):
    params = dataclasses.replace(PARAMS, min_new_tokens=5)
    step = spec(params=params, groups=(0, 1, 2))
    whole = finished(decode(NativeEngine(model, max_slots=6), step, requests(model)[:3]))
    engine = NativeEngine(model, max_slots=6)
    engine.begin_step(step)
    for request in requests(model)[:3]:
        engine.add_group(request)
    results = {}
    while engine.admit_next() is not None:
        pass
    for _ in range(iterations):
        results |= finished([engine.run_iteration()])
    engine.drop_group(0)
    engine.drop_group(0)
    assert engine.active_rows == SAMPLES
    assert engine.admit_next() == 2
    assert engine.run_iteration().rows == 2 * SAMPLES
    while not engine.finished:
        results |= finished([engine.run_iteration()])
    assert sorted(results) == [1, 2]
    assert all(results[group].tokens.equal(whole[group].tokens) for group in results)
    engine.drop_group(1)
    assert engine.finished


def test_a_step_whose_groups_are_all_dropped_is_finished_at_once(model):
    engine = NativeEngine(model, max_slots=2 * SAMPLES)
    engine.begin_step(spec(groups=(0, 1, 2)))
    first, second, third = requests(model)[:3]
    engine.add_group(first)
    engine.add_group(second)
    assert engine.admit_next() == 0
    for group in (1, 2, 0):
        assert not engine.finished
        engine.drop_group(group)
    engine.add_group(third)
    assert engine.finished
    assert not engine.needs_next_group()
    assert engine.admit_next() is None
    assert engine.active_rows == 0
    with pytest.raises(GroupRequestInvalid, match="group 9 is not in the step"):
        engine.drop_group(9)
    engine.release()
    assert engine.memory_bytes == 0


def test_replay_feeds_the_recording_and_gives_the_same_log_probabilities(model):
    original = finished(decode(NativeEngine(model, max_slots=100), spec(), requests(model)))
    recorded = {
        group: RecordedResponses(tokens=result.tokens, lengths=result.lengths)
        for group, result in original.items()
    }
    engine = NativeEngine(model, max_slots=100)
    replayed = finished(decode(engine, spec(forced=True, seed=1), requests(model, recorded)))
    assert all(same(original[group], replayed[group]) for group in original)


def test_replay_goes_by_recorded_lengths_not_by_stop_tokens(model):
    tokens = torch.tensor([STOPS[0], 20, 21, 22])
    recorded = {
        group: RecordedResponses(tokens=tokens, lengths=torch.tensor([0, 3, 1]))
        for group in range(len(PROMPTS))
    }
    recorded[4] = RecordedResponses(tokens=tokens[:0], lengths=torch.tensor([0, 0, 0]))
    iterations = decode(
        NativeEngine(model, max_slots=100), spec(forced=True), requests(model, recorded)
    )
    assert [iteration.rows for iteration in iterations] == [8, 4, 4]
    assert [group.group for group in iterations[0].finished] == [4]
    results = finished(iterations)
    assert results[4].tokens.shape == (0,)
    assert torch.equal(results[0].tokens, tokens)
    assert results[0].lengths.tolist() == [0, 3, 1]
    assert results[0].decode_iteration == 3


def test_recordings_that_do_not_fit_are_refused(model):
    engine = NativeEngine(model, max_slots=100)
    engine.begin_step(spec(forced=True))
    request = requests(model)[0]
    with pytest.raises(GroupRequestInvalid, match="must come with recorded responses"):
        engine.add_group(request)
    for lengths, message in [([2, 2], "must be 3 responses"), ([7, 0, 0], "max_new_tokens = 6")]:
        recorded = RecordedResponses(
            tokens=torch.full((sum(lengths),), 20), lengths=torch.tensor(lengths)
        )
        with pytest.raises(GroupRequestInvalid, match=message):
            engine.add_group(dataclasses.replace(request, recorded=recorded))
    engine.begin_step(spec()) if engine.finished else engine.abort()
    engine.begin_step(spec())
    recorded = RecordedResponses(tokens=torch.zeros(0), lengths=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(GroupRequestInvalid, match="must come without recorded responses"):
        engine.add_group(dataclasses.replace(request, recorded=recorded))


def test_greedy_decoding_gives_all_samples_the_likeliest_tokens(model):
    params = dataclasses.replace(PARAMS, temperature=0.0)
    results = finished(
        decode(NativeEngine(model, max_slots=100), spec(params=params), requests(model))
    )
    for group, result in results.items():
        first, *others = result.tokens.split(result.lengths.tolist())
        assert all(torch.equal(first, other) for other in others), group


def test_one_new_token_is_legal_and_needs_no_second_pass(model):
    params = dataclasses.replace(PARAMS, max_new_tokens=1)
    iterations = decode(NativeEngine(model, max_slots=100), spec(params=params), requests(model))
    assert len(iterations) == 1
    assert all(group.lengths.tolist() == [1] * SAMPLES for group in iterations[0].finished)


def test_a_minimum_length_forbids_stop_tokens_before_it(model):
    every_token_stops = tuple(range(40))
    free = dataclasses.replace(PARAMS, stop_token_ids=STOPS, min_new_tokens=5)
    results = finished(
        decode(NativeEngine(model, max_slots=100), spec(params=free), requests(model))
    )
    assert all((result.lengths >= 5).all() for result in results.values())
    one = dataclasses.replace(PARAMS, stop_token_ids=every_token_stops, min_new_tokens=1)
    results = finished(
        decode(NativeEngine(model, max_slots=100), spec(params=one), requests(model))
    )
    assert all((result.lengths == 1).all() for result in results.values())


def test_abort_drops_the_step_and_the_same_step_gives_the_same_again(model):
    engine = NativeEngine(model, max_slots=6)
    expected = finished(decode(engine, spec(), requests(model)))
    engine.begin_step(spec())
    for request in requests(model)[:2]:
        engine.add_group(request)
        engine.admit_next()
    engine.run_iteration()
    with pytest.raises(EngineStateInvalid, match="step 4 is not finished"):
        engine.begin_step(spec())
    with pytest.raises(EngineStateInvalid, match="step 4 is not finished"):
        engine.release()
    engine.abort()
    engine.abort()
    assert engine.finished
    assert engine.active_rows == 0
    results = finished(decode(engine, spec(), requests(model)))
    assert all(same(expected[group], results[group]) for group in expected)


def test_release_gives_the_kv_memory_back(model):
    engine = NativeEngine(model, max_slots=6)
    engine.release()
    decode(engine, spec(), requests(model))
    assert engine.memory_bytes > 0
    engine.release()
    engine.release()
    assert engine.memory_bytes == 0
    with pytest.raises(EngineStateInvalid, match="no group is decoding"):
        engine.run_iteration()


def test_more_responses_than_rows_are_refused(model):
    engine = NativeEngine(model, max_slots=2)
    with pytest.raises(GroupRequestInvalid, match="must be from 1 to the engine's 2 rows"):
        engine.begin_step(spec())


def test_non_finite_logits_name_group_response_and_token():
    broken = bound_model(CONFIG, dtype=torch.float32, train_vision=False)
    broken.weights.fill_(math.nan)
    model = SplitModel(broken.model)
    engine = NativeEngine(model, max_slots=3)
    with pytest.raises(NonFiniteLogits, match="token 0 of response 0 of group 4 is nan"):
        decode(engine, spec(groups=(4,)), requests(model)[4:])


def test_limits_end_each_response_and_change_no_token_before(model):
    exact = dataclasses.replace(PARAMS, stop_token_ids=())
    limits = [(1, 6, 3), (2, 2, 2), (6, 1, 5), (4, 4, 1), (3, 6, 6)]
    free = decode(NativeEngine(model, max_slots=99), spec(params=exact), requests(model))
    limited = [
        dataclasses.replace(request, limits=limits[request.group]) for request in requests(model)
    ]
    found = decode(NativeEngine(model, max_slots=99), spec(params=exact), limited)
    for group, short in finished(found).items():
        long = finished(free)[group]
        assert tuple(short.lengths.tolist()) == limits[group]
        assert long.lengths.tolist() == [6] * SAMPLES
        whole = long.tokens.split(long.lengths.tolist())
        for sample_index, tokens in enumerate(short.tokens.split(short.lengths.tolist())):
            assert torch.equal(tokens, whole[sample_index][: len(tokens)])


@pytest.mark.parametrize("limits", [(1, 2), (0, 1, 2), (1, 2, 7)])
def test_limits_that_do_not_fit_are_refused(model, limits):
    engine = NativeEngine(model, max_slots=99)
    engine.begin_step(spec())
    with pytest.raises(GroupRequestInvalid, match="limits"):
        engine.add_group(dataclasses.replace(requests(model)[0], limits=limits))
