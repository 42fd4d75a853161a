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
        outcome = await pool.score(7, ["yes", "", "no..no"], [row] * 3)
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
        ("exits", FailureKind.RAISED, "SystemExit: 4"),
        ("gives_nan", FailureKind.NOT_FINITE, "returned nan"),
        ("gives_text", FailureKind.WRONG_TYPE, "returned str"),
        ("ends_its_process", FailureKind.DIED, "its process ended"),
    ],
)
async def test_a_failure_counts_as_the_default_where_the_recipe_says_so(name, kind, cause):
    async with RewardPool(config(name, on_error="default", default_value=-1.0)) as pool:
        outcome = await pool.score(0, ["good", "bad", "good"], [{}] * 3)
        again = await pool.score(1, ["good"], [{}])
    assert outcome.rewards == (1.0, -1.0, 1.0)
    (failure,) = outcome.failures
    assert (failure.function, failure.sample, failure.kind) == (f"{MODULE}:{name}", 1, kind)
    assert cause in failure.cause
    assert "bad" not in failure.cause
    assert again.rewards == (1.0,)


async def test_a_function_that_overruns_is_killed_and_the_others_go_on():
    changes = {"on_error": "default", "time_limit_s": 0.3, "workers": 2}
    async with RewardPool(config("sleeps", **changes)) as pool:
        outcome = await pool.score(0, ["bad", "good", "good", "good"], [{}] * 4)
        assert outcome.rewards == (0.0, 1.0, 1.0, 1.0)
        (failure,) = outcome.failures
        assert failure.kind is FailureKind.TIMED_OUT
        assert "time_limit_s = 0.3" in failure.cause
        assert (await pool.score(1, ["good"] * 5, [{}] * 5)).rewards == (1.0,) * 5


async def test_a_failure_drops_the_group_and_leaves_the_next_alone():
    async with RewardPool(config("length", "raises", on_error="drop_group")) as pool:
        dropped = await pool.score(0, ["good", "bad"], [{}, {}])
        kept = await pool.score(1, ["good"], [{}])
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
            await pool.score(3, ["good", "bad"], [{}, {}])
    assert caught.value.data["sample"] == 1
    assert caught.value.data["group"] == 3


async def test_each_call_has_a_row_of_its_own():
    row = {}
    async with RewardPool(config("changes_its_row")) as pool:
        outcome = await pool.score(0, ["a", "b"], [row, row])
    assert outcome.rewards == (1.0, 1.0)
    assert row == {}


async def test_cancelling_ends_the_running_functions(tmp_path):
    pid_file = tmp_path / "pids"
    async with RewardPool(config("spins_and_says_who", workers=2)) as pool:
        row = {"pid_file": str(pid_file)}
        scoring = asyncio.create_task(pool.score(0, ["a", "b"], [row, row]))
        pids = await asyncio.to_thread(_pids, pid_file, 2)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        await asyncio.to_thread(_wait_until_gone, pids)


async def test_an_idle_worker_that_is_killed_is_replaced():
    async with RewardPool(config("length")) as pool:
        (victim,) = workers()
        victim.kill()
        await asyncio.to_thread(_wait_until_gone, [victim.pid])
        assert (await pool.score(0, ["abc"], [{}])).rewards == (3.0,)


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
        assert (await pool.score(0, ["x"], [{}])).rewards == (2.5,)


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
