from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.rl.reward_config import RewardConfig
from services.rollout.rewards import worker
from services.rollout.rewards.errors import RewardFailed, RewardFunctionInvalid
from services.rollout.rewards.pool import RewardPool
from services.rollout.rewards.worker import FailureKind

MODULE = "tests.integration.rewards.functions_for_tests"
REPOSITORY = Path(__file__).parents[3]


def config(*names, **changes):
    functions = [{"function": f"{MODULE}:{name}"} for name in names]
    return RewardConfig(**{"functions": functions, "time_limit_s": 20.0, **changes})


def workers():
    return [child for child in psutil.Process().children() if "spawn_main" in _command(child)]


def _command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


async def test_rewards_are_weighted_sums_of_all_functions():
    weighted = RewardConfig(
        functions=[
            {"function": f"{MODULE}:length", "weight": 0.5},
            {"function": f"{MODULE}:exact", "weight": 2.0},
        ],
        workers=2,
    )
    row = {"answer": "yes", "scale": 3}
    async with RewardPool(weighted) as pool:
        outcome = await pool.score(7, ["yes", "", "no..no"], [row] * 3, evaluation=False)
    assert outcome.group == 7
    assert not outcome.dropped
    assert outcome.rewards == (2.5, 0.0, 1.0)
    assert outcome.values[f"{MODULE}:length"] == (1.0, 0.0, 2.0)
    assert outcome.values[f"{MODULE}:exact"] == (1.0, 0.0, 0.0)
    assert outcome.failures == ()
    timing = outcome.timings[f"{MODULE}:exact"]
    assert timing.evaluations == 3
    assert timing.total_s >= timing.longest_s > 0


@pytest.mark.parametrize(
    ("name", "kind", "cause"),
    [
        ("raises", FailureKind.RAISED, "ValueError: cannot parse this"),
        ("raises_the_unspeakable", FailureKind.RAISED, "Unspeakable: (its message cannot be read)"),
        ("gives_too_much", FailureKind.RAISED, "OverflowError: "),
        ("exits", FailureKind.RAISED, "SystemExit: 4"),
        ("gives_nan", FailureKind.NOT_FINITE, "returned nan"),
        ("gives_text", FailureKind.WRONG_TYPE, "returned str"),
        ("ends_its_process", FailureKind.DIED, "its process ended"),
    ],
)
async def test_a_failure_counts_as_the_default_where_the_recipe_says_so(name, kind, cause):
    async with RewardPool(config(name, on_error="default", default_value=-1.0)) as pool:
        outcome = await pool.score(0, ["good", "bad", "good"], [{}] * 3, evaluation=False)
        again = await pool.score(1, ["good"], [{}], evaluation=False)
    assert outcome.rewards == (1.0, -1.0, 1.0)
    (failure,) = outcome.failures
    assert (failure.function, failure.sample, failure.kind) == (f"{MODULE}:{name}", 1, kind)
    assert cause in failure.cause
    assert "bad" not in failure.cause
    assert again.rewards == (1.0,)


async def test_a_function_that_overruns_is_killed_and_the_others_go_on():
    changes = {"on_error": "default", "time_limit_s": 0.3, "workers": 2}
    async with RewardPool(config("sleeps", **changes)) as pool:
        outcome = await pool.score(0, ["bad", "good", "good", "good"], [{}] * 4, evaluation=False)
        assert outcome.rewards == (0.0, 1.0, 1.0, 1.0)
        (failure,) = outcome.failures
        assert failure.kind is FailureKind.TIMED_OUT
        assert "time_limit_s = 0.3" in failure.cause
        assert (await pool.score(1, ["good"] * 5, [{}] * 5, evaluation=False)).rewards == (1.0,) * 5


class CountingPool(RewardPool):
    """Counts the calls of workers."""

    calls = 0

    async def _run(self, *arguments):
        self.calls += 1
        return await super()._run(*arguments)


async def test_one_call_of_a_worker_does_all_responses_of_a_quick_function():
    async with CountingPool(config("length", "exact")) as pool:
        before = pool.calls
        outcome = await pool.score(0, ["a"] * 20, [{"answer": "a"}] * 20, evaluation=False)
        assert pool.calls - before == 2
    assert outcome.rewards == (2.0,) * 20


async def test_the_responses_of_a_slow_function_get_a_call_each():
    async with CountingPool(config("takes_a_while", workers=2)) as pool:
        before = pool.calls
        first = await pool.score(0, ["a"] * 3, [{}] * 3, evaluation=False)
        assert pool.calls - before == 3
        before = pool.calls
        second = await pool.score(1, ["a"] * 3, [{}] * 3, evaluation=False)
        assert pool.calls - before == 3
        await pool.score(2, ["quick"] * 3, [{}] * 3, evaluation=False)
        before = pool.calls
        third = await pool.score(3, ["quick"] * 3, [{}] * 3, evaluation=False)
        assert pool.calls - before == 1
    assert first.rewards == second.rewards == (1.0,) * 3 == third.rewards
    assert first.timings[f"{MODULE}:takes_a_while"].total_s >= 0.45


async def test_a_failure_of_a_shared_call_leaves_the_other_functions_alone():
    names = ("length", "sleeps", "ends_its_process")
    changes = {"on_error": "default", "time_limit_s": 1.0, "workers": 2}
    async with RewardPool(config(*names, **changes)) as pool:
        outcome = await pool.score(5, ["good", "bad", "good"], [{}] * 3, evaluation=False)
    assert outcome.rewards == (6.0, 3.0, 6.0)
    assert [(f.function, f.sample, f.kind) for f in outcome.failures] == [
        (f"{MODULE}:sleeps", 1, FailureKind.TIMED_OUT),
        (f"{MODULE}:ends_its_process", 1, FailureKind.DIED),
    ]
    assert all(timing.evaluations == 3 for timing in outcome.timings.values())


@pytest.mark.parametrize("policy", ["drop_group", "stop"])
@pytest.mark.parametrize(("name", "kind"), [("sleeps", "timed_out"), ("ends_its_process", "died")])
async def test_the_culprit_of_a_failed_call_is_named(policy, name, kind):
    async with RewardPool(config(name, on_error=policy, time_limit_s=1.0)) as pool:
        scoring = pool.score(3, ["good", "good", "bad"], [{}] * 3, evaluation=False)
        if policy == "stop":
            with pytest.raises(RewardFailed, match=f"on response 2 of group 3: {kind}"):
                await scoring
            return
        outcome = await scoring
        assert outcome.dropped
        assert [(f.sample, f.kind.value) for f in outcome.failures] == [(2, kind)]


def test_a_response_over_its_own_limit_times_out_even_if_it_comes_to_an_end(monkeypatch):
    def slow(completion, row):
        time.sleep(0.05 * (completion == "bad"))
        return 1.0

    monkeypatch.setitem(worker._functions, "slow", slow)
    good, bad = worker.evaluate("slow", ["good", "bad"], [{}] * 2, time_limit_s=0.04, budget_s=9)
    assert (good.value, good.failure) == (1.0, None)
    assert (bad.value, bad.failure) == (0.0, FailureKind.TIMED_OUT)
    assert bad.cause == "ran longer than time_limit_s = 0.04"
    assert bad.elapsed_s >= 0.05


def test_a_call_begins_no_further_response_over_its_budget_but_always_one(monkeypatch):
    monkeypatch.setitem(worker._functions, "one", lambda completion, row: 1.0)
    done = worker.evaluate("one", ["a", "b"], [{}] * 2, time_limit_s=9, budget_s=-1)
    assert [evaluation.value for evaluation in done] == [1.0]


async def test_held_out_responses_have_weights_of_their_own():
    weighted = RewardConfig(
        functions=[
            {"function": f"{MODULE}:exact", "eval_weight": 2.0},
            {"function": f"{MODULE}:length", "weight": 0.5, "eval_weight": 0.0},
            {"function": f"{MODULE}:raises", "weight": 0.0, "eval_weight": 3.0},
            {"function": f"{MODULE}:takes_a_while", "weight": 0.25},
        ],
        on_error="stop",
    )
    row = {"answer": "quick"}
    async with RewardPool(weighted) as pool:
        trained = await pool.score(0, ["quick"], [row], evaluation=False)
        held_out = await pool.score(0, ["quick"], [row], evaluation=True)
        assert (await pool.score(0, ["bad"], [row], evaluation=False)).failures == ()
        with pytest.raises(RewardFailed, match="raises' on response 0 of group 0"):
            await pool.score(0, ["bad"], [row], evaluation=True)
    assert trained.rewards == (1 + 0.5 * 5 + 0.25,)
    assert held_out.rewards == (2 + 3 + 0.25,)
    names = [f"{MODULE}:{name}" for name in ("exact", "raises", "takes_a_while")]
    assert list(held_out.values) == list(held_out.timings) == names


async def test_a_group_without_responses_has_no_rewards():
    async with RewardPool(config("length")) as pool:
        outcome = await pool.score(0, [], [], evaluation=False)
    assert (outcome.dropped, outcome.rewards) == (False, ())


async def test_a_failure_drops_the_group_and_leaves_the_next_alone():
    async with RewardPool(config("length", "raises", on_error="drop_group")) as pool:
        dropped = await pool.score(0, ["good", "bad"], [{}, {}], evaluation=False)
        kept = await pool.score(1, ["good"], [{}], evaluation=False)
    assert dropped.dropped
    assert dropped.rewards == ()
    assert dropped.values == {}
    assert [failure.sample for failure in dropped.failures] == [1]
    assert kept.rewards == (5.0,)


async def test_a_failure_stops_the_run_and_names_function_group_and_response():
    async with RewardPool(config("raises", on_error="stop")) as pool:
        with pytest.raises(
            RewardFailed, match="raises' on response 1 of group 3: raised"
        ) as caught:
            await pool.score(3, ["good", "bad"], [{}, {}], evaluation=False)
    assert caught.value.data["sample"] == 1
    assert caught.value.data["group"] == 3


async def test_each_response_has_a_row_of_its_own():
    row = {"seen": []}
    async with RewardPool(config("changes_its_row")) as pool:
        outcome = await pool.score(0, ["a", "b"], [row, row], evaluation=False)
    assert outcome.rewards == (1.0, 1.0)
    assert row == {"seen": []}


async def test_cancelling_ends_the_running_functions(tmp_path):
    pid_file = tmp_path / "pids"
    async with RewardPool(config("spins_and_says_who", workers=2)) as pool:
        row = {"pid_file": str(pid_file)}
        scorings = [
            asyncio.create_task(pool.score(group, ["a"], [row], evaluation=False))
            for group in range(2)
        ]
        pids = await asyncio.to_thread(_pids, pid_file, 2)
        for scoring in scorings:
            scoring.cancel()
        for scoring in scorings:
            with pytest.raises(asyncio.CancelledError):
                await scoring
        await asyncio.to_thread(_wait_until_gone, pids)


async def test_an_idle_worker_that_is_killed_is_replaced():
    async with RewardPool(config("length")) as pool:
        (victim,) = workers()
        victim.kill()
        await asyncio.to_thread(_wait_until_gone, [victim.pid])
        assert (await pool.score(0, ["abc"], [{}], evaluation=False)).rewards == (3.0,)


async def test_no_worker_is_left_after_close():
    pool = RewardPool(config("length", workers=2))
    await pool.start()
    pids = [worker.pid for worker in workers()]
    assert len(pids) == 2
    await pool.close()
    await pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no.such.module:f", "'no.such.module' is not on the import path"),
        (f"{MODULE}:no_such_function", "has no function 'no_such_function'"),
        (f"{MODULE}:takes_one", r"must take \(completion, row\)"),
        (f"{MODULE}:is_async", "must not be async"),
        ("no/such/file.py:f", "no such file"),
    ],
)
async def test_a_function_that_cannot_be_loaded_is_refused_at_the_start(function, message):
    pool = RewardPool(RewardConfig(functions=[{"function": function}]))
    with pytest.raises(RewardFunctionInvalid, match=message):
        await pool.start()
    assert workers() == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import missing_dependency", "No module named 'missing_dependency'"),
        ("import os; os._exit(5)", "their worker ended while it loaded them"),
    ],
)
async def test_a_file_that_fails_at_import_is_refused(tmp_path, text, message):
    path = tmp_path / "reward.py"
    path.write_text(text)
    pool = RewardPool(RewardConfig(functions=[{"function": f"{path}:f"}]))
    with pytest.raises(RewardFunctionInvalid, match=message):
        await pool.start()
    assert workers() == []


async def test_a_file_may_import_its_siblings(tmp_path):
    (tmp_path / "sibling_of_reward.py").write_text("VALUE = 2.5\n")
    path = tmp_path / "reward.py"
    path.write_text(
        "from sibling_of_reward import VALUE\n\ndef reward(completion, row):\n    return VALUE\n"
    )
    async with RewardPool(RewardConfig(functions=[{"function": f"{path}:reward"}])) as pool:
        assert (await pool.score(0, ["x"], [{}], evaluation=False)).rewards == (2.5,)


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    pid_file = tmp_path / "pids"
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.rewards.parent_for_tests", str(pid_file)],
        cwd=REPOSITORY,
    )
    try:
        pids = _pids(pid_file, 2)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    _wait_until_gone(pids)


def _pids(pid_file, count):
    """Wait until `count` workers have written their process ids."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        pids = pid_file.read_text().split() if pid_file.exists() else []
        if len(pids) >= count:
            return [int(pid) for pid in pids]
        time.sleep(0.02)
    raise AssertionError("the workers did not start")


def _wait_until_gone(pids):
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[p for p in pids if _runs(p)]}"
        time.sleep(0.02)


def _runs(pid):
    try:
        os.kill(pid, 0)
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
