"""SGLang on weights that change: read in place, or copied in buckets."""

from __future__ import annotations

import pytest

from common.vlm.names import VISUAL
from common.vlm.tiny import tiny_prompt
from services.rollout.engines.errors import EngineRefused
from services.rollout.engines.gate import NEW_TOKENS, gate_step, logprob_gate
from tests.sglang.policy import Policy, renamed, run_step

pytestmark = pytest.mark.sglang

BOUND = 2e-5


def difference(policy: Policy, engine, prompt) -> float:
    spec = policy.spec()
    (finished,) = run_step(engine, spec, [policy.request(0, prompt)])
    return float((finished.logprobs - policy.logprobs(prompt, finished, spec)).abs().max())


def test_an_image_seen_before_is_that_of_the_new_weights(aliased):
    prompt = tiny_prompt(aliased.policy.config, seed=8, images=[(1, 4, 4)])
    for seed in (1, 2, 0):
        aliased.policy.update(seed=seed)
        assert difference(aliased.policy, aliased.engine, prompt) < BOUND
        assert difference(aliased.policy, aliased.engine, prompt) < BOUND


def test_all_is_read_in_place(aliased):
    driver, layout = aliased.engine.driver, aliased.policy.layout
    text = [entry for entry in layout.entries if not entry.name.startswith(VISUAL)]
    assert driver.aliased_bytes == 4 * sum(entry.numel for entry in text)
    assert driver.copied_bytes == 0
    difference(aliased.policy, aliased.engine, tiny_prompt(aliased.policy.config, seed=8))
    refreshed = aliased.engine.refreshed
    assert (refreshed.alias_bytes, refreshed.rebuild_bytes) == (driver.aliased_bytes, 0)
    assert refreshed.seconds > 0


def test_the_gate_passes(aliased):
    step = aliased.policy.spec(max_new_tokens=NEW_TOKENS, temperature=0.9)
    found = logprob_gate(
        aliased.engine, aliased.policy.model, gate_step(step, step.params), bound=BOUND
    )
    assert found.keys() == {"text", "image", "video"}


def test_buckets(folder, engine_python, tmp_path):
    with Policy.of(folder) as policy:
        engine = policy.engine(engine_python, tmp_path, weights="copy")
        prompt = tiny_prompt(policy.config, seed=9, images=[(1, 4, 4)])
        try:
            engine.prepare()
            assert engine.driver.aliased_bytes == 0
            for seed in (4, 5):
                policy.update(seed=seed)
                assert difference(policy, engine, prompt) < BOUND
            text = [one for one in policy.layout.entries if not one.name.startswith(VISUAL)]
            copied = 4 * sum(one.numel for one in text)
            assert (engine.refreshed.alias_bytes, engine.refreshed.rebuild_bytes) == (0, copied)
        finally:
            engine.close()


def test_a_weight_that_nobody_takes_is_named(folder, engine_python, tmp_path):
    with Policy.of(folder) as policy:
        old = "model.language_model.norm.weight"
        layout = renamed(policy.layout, old, "model.language_model.other.weight")
        engine = policy.engine(engine_python, tmp_path, layout=layout)
        try:
            with pytest.raises(EngineRefused, match=r"MissingWeight.*language_model\.norm\.weight"):
                engine.prepare()
            assert engine.driver.pid == 0
        finally:
            engine.close()
