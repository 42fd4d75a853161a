"""SGLang over two tensor-parallel ranks of its own, each of which reads its part in place."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import torch

from common.vlm.names import VISUAL
from common.vlm.tiny import tiny_prompt
from services.rollout.engines.errors import EngineGone
from services.rollout.engines.native import NativeEngine
from tests.sglang.conftest import Running
from tests.sglang.node import scheduler
from tests.sglang.policy import SAMPLES, Policy, run_step
from tests.sglang.test_processes import wait_for_ever
from tests.sglang.test_sampling import BOUND, PROMPTS

pytestmark = pytest.mark.sglang

RANKS = 2
START_S = 500.0
GONE_S = 20.0
SILENCE_S = 200.0


@pytest.fixture(scope="module")
def split(folder, engine_python, tmp_path_factory):
    with Policy.of(folder, ranks=RANKS) as policy:
        run = tmp_path_factory.mktemp("split")
        engine = policy.engine(engine_python, run, start_s=START_S, deadline_s=SILENCE_S)
        try:
            engine.prepare()
            yield Running(policy=policy, engine=engine)
        finally:
            engine.close()


def test_tokens_are_those_of_one_rank(split):
    """Also after an update, which moves nothing."""
    policy, engine = split.policy, split.engine
    for seed in (0, 1):
        policy.update(seed=seed)
        prompts = [
            tiny_prompt(policy.config, seed=9 + n, **PROMPTS[kind])
            for n, kind in enumerate(PROMPTS)
        ]
        spec = policy.spec(groups=len(prompts), max_new_tokens=12)
        requests = [policy.request(group, prompt) for group, prompt in enumerate(prompts)]
        native = run_step(NativeEngine(policy.model, max_slots=SAMPLES), spec, requests)
        for ours, theirs in zip(native, run_step(engine, spec, requests), strict=True):
            assert torch.equal(ours.tokens, theirs.tokens)
            assert (ours.logprobs - theirs.logprobs).abs().max() < BOUND


def test_each_rank_reads_its_part_in_place(split):
    parts = [
        entry
        for part in split.policy.parts
        for entry in part.layout.entries
        if not entry.name.startswith(VISUAL)
    ]
    assert split.engine.driver.aliased_bytes == 4 * sum(entry.numel for entry in parts)
    assert split.engine.driver.copied_bytes == 0


def test_the_end_of_one_of_its_processes_is_noticed(split):
    """The last test of the engine: it is killed."""
    policy, engine = split.policy, split.engine
    engine.begin_step(policy.spec(max_new_tokens=400))
    engine.add_group(policy.request(0, tiny_prompt(policy.config, seed=1)))
    engine.admit_next()
    while not engine.run_iteration().count:
        pass
    children = psutil.Process(engine.driver.pid).children(recursive=True)
    os.kill(scheduler(engine.driver.pid, rank=1), signal.SIGKILL)
    with pytest.raises(EngineGone):
        wait_for_ever(engine)
    assert "have ended" in engine.trouble
    gone, alive = psutil.wait_procs(children, timeout=GONE_S)
    assert (len(gone), alive) == (len(children), [])
    engine.abort()
    engine.release()
