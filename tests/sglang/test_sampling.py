"""What SGLang samples, against the pass that trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.vlm.tiny import FIRST_TEXT_ID, tiny_prompt
from services.rollout.engines.errors import GroupRequestInvalid
from services.rollout.engines.native import NativeEngine
from services.rollout.engines.protocol import FinishReason
from tests.sglang.policy import SAMPLES, Policy, run_step

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


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 5}],
    ids=["whole distribution", "top_p", "top_k"],
)
def test_tokens_are_those_of_the_native_engine(aliased, params):
    """Of the same seeds, whatever decodes at the same time: here more groups than there."""
    policy = aliased.policy
    prompts = [
        tiny_prompt(policy.config, seed=9 + n, **PROMPTS[kind]) for n, kind in enumerate(PROMPTS)
    ]
    spec = policy.spec(groups=len(prompts), max_new_tokens=24, **params)
    requests = [policy.request(group, prompt) for group, prompt in enumerate(prompts)]
    native = run_step(NativeEngine(policy.model, max_slots=SAMPLES), spec, requests)
    for ours, theirs in zip(native, run_step(aliased.engine, spec, requests), strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        assert (ours.logprobs - theirs.logprobs).abs().max() < BOUND


def test_another_seed_gives_other_tokens(aliased):
    policy = aliased.policy
    requests = [policy.request(0, tiny_prompt(policy.config, seed=10))]
    spec = policy.spec(max_new_tokens=24)
    first, again, other = (
        run_step(aliased.engine, each, requests)[0].tokens
        for each in (spec, spec, replace(spec, seed=spec.seed + 1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_responses_of_a_group_share_one_prefix(aliased):
    prompt = tiny_prompt(aliased.policy.config, seed=2, images=[(1, 8, 8)])
    spec = aliased.policy.spec(samples=4)
    run_step(aliased.engine, spec, [aliased.policy.request(0, prompt)])
    assert aliased.engine.cached_tokens == 4 * prompt.prefix_tokens


def test_a_prompt_that_may_leave_the_cache_keeps_its_embeddings(folder, engine_python, tmp_path):
    """With fewer places than a step needs."""
    with Policy.of(folder) as policy:
        engine = policy.engine(engine_python, tmp_path, step_tokens=1 << 20)
        try:
            engine.prepare()
            prompt = tiny_prompt(policy.config, seed=2, images=[(1, 8, 8)])
            spec = policy.spec()
            (finished,) = run_step(engine, spec, [policy.request(0, prompt)])
            trainer = policy.logprobs(prompt, finished, spec)
            assert (finished.logprobs - trainer).abs().max() < BOUND
        finally:
            engine.close()


def test_iterations_are_the_steps_of_sglang_s_decode(aliased):
    """Each gives every response that is not complete a token, in whatever reports it is told."""
    engine, policy = aliased.engine, aliased.policy
    limits = [(20, 3), (7, 7)]
    engine.begin_step(policy.spec(groups=len(limits), max_new_tokens=20))
    for group, limit in enumerate(limits):
        prompt = tiny_prompt(policy.config, seed=8 + group)
        engine.add_group(policy.request(group, prompt, limits=limit))
    while engine.admit_next() is not None:
        pass
    assert engine.active_rows == 0
    while not engine.decodes():
        pass
    assert engine.active_rows <= 4
    iterations, finished = [], []
    while not engine.finished:
        iterations.append(engine.run_iteration())
        finished += iterations[-1].finished
    engine.release()
    assert engine.active_rows == 0
    assert sum(each.rows for each in iterations) == 20 + 3 + 7 + 7
    # groups that are admitted one after the other need not begin with the same step
    assert 20 <= sum(each.count for each in iterations) <= 20 + 7
    assert iterations[-1].number == sum(each.count for each in iterations)
    ends = {each.group: each.decode_iteration for each in finished}
    assert 7 <= ends[1] <= ends[0] == iterations[-1].number


def test_a_stop_token_ends_a_response(aliased):
    stops = tuple(range(FIRST_TEXT_ID, FIRST_TEXT_ID + 200))
    spec = aliased.policy.spec(samples=4, max_new_tokens=16, stop_token_ids=stops)
    prompt = tiny_prompt(aliased.policy.config, seed=3)
    (finished,) = run_step(aliased.engine, spec, [aliased.policy.request(0, prompt)])
    for response, reason in zip(
        finished.tokens.split(finished.lengths.tolist()), finished.finish_reasons, strict=True
    ):
        stopped = [int(token) in stops for token in response]
        assert not any(stopped[:-1])
        assert stopped[-1] == (reason == FinishReason.STOP)
        assert stopped[-1] or len(response) == 16
    trainer = aliased.policy.logprobs(prompt, finished, spec)
    assert (finished.logprobs - trainer).abs().max() < BOUND


def test_set_lengths_are_kept(aliased):
    prompt = tiny_prompt(aliased.policy.config, seed=4)
    request = aliased.policy.request(0, prompt, limits=(5, 1))
    (finished,) = run_step(aliased.engine, aliased.policy.spec(), [request])
    assert finished.lengths.tolist() == [5, 1]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}], ids=["greedy", "top_k"])
def test_the_likeliest_tokens(aliased, params):
    prompt = tiny_prompt(aliased.policy.config, seed=5, images=[(1, 4, 4)])
    spec = aliased.policy.spec(**params)
    (finished,) = run_step(aliased.engine, spec, [aliased.policy.request(0, prompt)])
    first, second = finished.tokens.split(finished.lengths.tolist())
    assert torch.equal(first, second)
    # a log-probability is that of the whole distribution, however much of it is sampled from
    trainer = aliased.policy.logprobs(prompt, finished, spec)
    assert (finished.logprobs - trainer).abs().max() < BOUND


def test_more_groups_than_places(aliased):
    config = aliased.policy.config
    prompts = [tiny_prompt(config, seed=s, images=[(1, 4, 4)] * (s % 2)) for s in range(5)]
    spec = aliased.policy.spec(groups=5, samples=4)
    requests = [aliased.policy.request(group, each) for group, each in enumerate(prompts)]
    finished = run_step(aliased.engine, spec, reversed(requests))
    assert [each.group for each in finished] == [0, 1, 2, 3, 4]
    for each, prompt in zip(finished, prompts, strict=True):
        trainer = aliased.policy.logprobs(prompt, each, spec)
        assert (each.logprobs - trainer).abs().max() < BOUND


def test_a_dropped_group_does_not_come(aliased):
    engine, policy = aliased.engine, aliased.policy
    prompts = [tiny_prompt(policy.config, seed=seed) for seed in range(3)]
    engine.begin_step(policy.spec(groups=3, max_new_tokens=200))
    for group, prompt in enumerate(prompts):
        engine.add_group(
            policy.request(group, prompt, limits=(200 if group == 1 else 3,) * SAMPLES)
        )
    while engine.admit_next() is not None:
        pass
    finished = list(engine.run_iteration().finished)
    engine.drop_group(1)
    while not engine.finished:
        finished += engine.run_iteration().finished
    assert sorted(each.group for each in finished) == [0, 2]
    # a group of that number in the next step is another one
    requests = [policy.request(group, prompt) for group, prompt in enumerate(prompts)]
    finished = run_step(engine, policy.spec(groups=3), requests)
    assert [each.group for each in finished] == [0, 1, 2]


def test_an_aborted_step_leaves_nothing_behind(aliased):
    engine, policy = aliased.engine, aliased.policy
    prompt = tiny_prompt(policy.config, seed=6)
    engine.begin_step(policy.spec(max_new_tokens=400))
    engine.add_group(policy.request(0, prompt))
    engine.admit_next()
    while not engine.run_iteration().count:
        pass
    engine.abort()
    assert engine.finished
    assert engine.active_rows == 0
    (finished,) = run_step(engine, policy.spec(), [policy.request(0, prompt)])
    assert finished.lengths.tolist() == [6] * SAMPLES


def test_placeholders_need_embeddings(aliased):
    engine, policy = aliased.engine, aliased.policy
    prompt = tiny_prompt(policy.config, seed=7, images=[(1, 4, 4)])
    request = policy.request(0, prompt)
    torn = replace(request, vision=request.vision[1:])
    engine.begin_step(policy.spec())
    try:
        with pytest.raises(GroupRequestInvalid, match="4 placeholders for 3"):
            engine.add_group(torn)
    finally:
        engine.abort()
