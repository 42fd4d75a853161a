"""SGLang's memory for keys and values, which it has for the time of a decode.

A CPU's engine keeps the memory itself, but its scheduler carries out the calls: it ends itself if
it is asked to resume what it has not released, or to release while it has requests.
"""

from __future__ import annotations

import pytest
import torch

from common.vlm.tiny import tiny_prompt
from tests.sglang.policy import KV_BYTES, Policy, run_step

pytestmark = pytest.mark.sglang


def test_it_is_there_from_the_beginning_of_a_step_to_its_release(aliased):
    engine, policy = aliased.engine, aliased.policy
    request = policy.request(0, tiny_prompt(policy.config, seed=1, images=[(1, 4, 4)]))
    spec = policy.spec(max_new_tokens=24)
    (before,) = run_step(engine, spec, [request])
    assert engine.memory_bytes == 0
    engine.release()
    engine.begin_step(spec)
    assert engine.memory_bytes == KV_BYTES
    engine.abort()
    assert engine.memory_bytes == KV_BYTES
    engine.begin_step(spec)
    engine.abort()
    engine.release()
    assert engine.memory_bytes == 0
    (after,) = run_step(engine, spec, [request])
    assert torch.equal(before.tokens, after.tokens)


def test_it_is_released_right_after_an_abort(aliased):
    engine, policy = aliased.engine, aliased.policy
    prompts = [tiny_prompt(policy.config, seed=seed) for seed in range(3)]
    spec = policy.spec(groups=3, max_new_tokens=400)
    engine.begin_step(spec)
    for group, prompt in enumerate(prompts):
        engine.add_group(policy.request(group, prompt))
    while engine.admit_next() is not None:
        pass
    while not engine.run_iteration().count:
        pass
    engine.abort()
    engine.release()
    assert (engine.memory_bytes, engine.trouble) == (0, "")
    (finished,) = run_step(engine, policy.spec(), [policy.request(0, prompts[0])])
    assert finished.lengths.tolist() == [6, 6]


def test_it_stays_where_that_is_wanted(folder, engine_python, tmp_path):
    with Policy.of(folder) as policy:
        engine = policy.engine(engine_python, tmp_path, release_memory=False)
        try:
            engine.prepare()
            assert engine.memory_bytes == KV_BYTES
            run_step(engine, policy.spec(), [policy.request(0, tiny_prompt(policy.config, seed=1))])
            assert engine.memory_bytes == KV_BYTES
        finally:
            engine.close()
        assert engine.memory_bytes == 0
