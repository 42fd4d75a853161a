"""What one rank drives and several hear, without SGLang: ranks are threads with Gloo groups."""

from __future__ import annotations

import pytest
import torch

from common.errors import RollplexError
from common.ids import GroupId, WeightsVersion
from services.rollout.engines.errors import EngineGone, EngineRefused
from services.rollout.engines.sglang.joined import JoinedDriver
from services.rollout.engines.sglang.messages import SampledResponse
from services.rollout.engines.sglang.wire import Frame
from tests.unit.weights.ranks import Ranks

RANKS = 2
RESPONSE = SampledResponse(
    group=3,
    sample=1,
    tokens=torch.arange(5),
    logprobs=torch.linspace(-2.0, -1.0, 5),
    versions=("4",),
    cached_tokens=7,
)


@pytest.fixture(scope="module")
def ranks():
    threads = Ranks(RANKS)
    yield threads
    threads.close()


class Driver:
    """Says what it is told to say, and notes what it is asked for."""

    def __init__(self, *, reports=(), error=None, trouble=""):
        self.pid, self.trouble, self.has_kv = 17, trouble, False
        self.asked = []
        self._reports, self._error = reports, error

    def reports(self, decoding):
        self.asked.append(f"reports {sorted(decoding)}")
        if self._error is not None:
            raise self._error
        return self._reports

    def __getattr__(self, name):
        return lambda *_, **__: self.asked.append(name)


def joined(ranks, driver, work, *, keeps_kv=False):
    """What `work` returns on each rank, or raises there."""

    def run(group):
        ours = JoinedDriver(group, driver if group.rank() == 0 else None, keeps_kv=keeps_kv)
        try:
            return work(ours)
        except RollplexError as error:
            return error

    return ranks.run(RANKS, run)


def test_all_ranks_hear_the_same(ranks):
    frames = (Frame(kind="progress", body={"tokens": 2}), RESPONSE.frame())
    driver = Driver(reports=frames)
    heard = joined(ranks, driver, lambda one: one.reports([GroupId(3)]))
    assert driver.asked == ["reports [3]"]
    for progress, sampled in heard:
        assert (progress.kind, progress.body) == ("progress", {"tokens": 2})
        got = SampledResponse.of(sampled)
        assert (got.group, got.sample, got.versions, got.cached_tokens) == (3, 1, ("4",), 7)
        assert torch.equal(got.tokens, RESPONSE.tokens)
        assert torch.equal(got.logprobs, RESPONSE.logprobs)


def test_silence_is_heard_too(ranks):
    assert [list(heard) for heard in joined(ranks, Driver(), lambda one: one.reports([]))] == [
        [],
        [],
    ]


@pytest.mark.parametrize("kind", [EngineGone, EngineRefused])
def test_all_ranks_fail_alike(ranks, kind):
    found = joined(ranks, Driver(error=kind("no more")), lambda one: one.reports([]))
    assert [(type(error), str(error)) for error in found] == [(kind, "no more")] * RANKS


def test_all_ranks_fail_alike_where_the_first_was_alone(ranks):
    """It could not tell the engine of a group, or of its end."""
    driver = Driver()

    def refuse(_):
        driver.asked.append("told")
        raise EngineGone("no more")

    driver.sample = driver.drop = refuse

    def step(one):
        one.sample(RESPONSE)
        one.drop(GroupId(3))
        one.reports([])

    found = joined(ranks, driver, step)
    assert [(type(error), str(error)) for error in found] == [(EngineGone, "no more")] * RANKS
    assert driver.asked == ["told"]


def test_processes_that_have_ended_are_not_started_in_a_step(ranks):
    driver = Driver(trouble="they have ended")
    found = joined(ranks, driver, lambda one: one.begin(WeightsVersion(1)))
    assert [type(error) for error in found] == [EngineGone] * RANKS
    assert [str(error) for error in found] == ["they have ended"] * RANKS
    assert driver.asked == []


@pytest.mark.parametrize("keeps_kv", [False, True])
def test_memory_is_there_for_a_step(ranks, keeps_kv):
    def step(one):
        seen = []
        for call in (one.prepare, lambda: one.begin(WeightsVersion(1)), one.release):
            call()
            seen.append(one.has_kv)
        return seen

    _, second = joined(ranks, Driver(), step, keeps_kv=keeps_kv)
    assert second == [keeps_kv, True, keeps_kv]


def test_the_first_rank_waits_for_no_other_behind_an_abort(ranks):
    driver = Driver()

    def alone(one):
        one.begin(WeightsVersion(1))
        if one.pid:
            one.abort(decoding=True)
            one.release()
        return one.pid

    assert joined(ranks, driver, alone) == [driver.pid, 0]
    assert driver.asked == ["begin", "abort", "release"]
