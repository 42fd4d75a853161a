"""Data workers are real processes that may die."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from common.data.errors import SampleError, SampleFault
from common.data.workers import SamplePool, SampleReader, SampleSource
from common.errors import FailedPrecondition, InvalidArgument
from tests.integration.data import rows

pytestmark = pytest.mark.timeout(180)  # the first one waits until its imports are done

ROWS = "tests.integration.data.rows:rows"


def source_of(model_folder, train=ROWS):
    return SampleSource(
        model_path=str(model_folder), splits={"train": train}, max_prompt_tokens=100
    )


async def gone(pid, limit_s=20.0):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        await asyncio.sleep(0.05)
    return False


async def test_workers_prepare_what_this_process_would(model_folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    source = source_of(model_folder)
    here = SampleReader(source).prepare
    async with SamplePool(source, workers=1) as pool:
        prepared = await asyncio.gather(*(pool.prepare("train", n) for n in (0, 5, 6, 7)))
        again = await pool.prepare("train", 5)
        with pytest.raises(SampleError, match="RuntimeError: no such frame") as caught:
            await pool.prepare("train", 3)
        assert caught.value.fault is SampleFault.UNREADABLE_ROW
        assert pool.deaths == 0
    for number, sample in zip((0, 5, 6, 7), prepared, strict=True):
        assert sample.sample == f"train[{number}]"
        expected = here("train", number)
        assert sample.arrays.keys() == expected.arrays.keys()
        for name, array in sample.arrays.items():
            assert (array == expected.arrays[name]).all()
        row = json.loads(sample.row_json)
        assert (row["n"], row["threads"]) == (number, "1")
        assert row["pid"] != os.getpid()
    assert again is prepared[1]
    assert await gone(json.loads(again.row_json)["pid"])
    with pytest.raises(FailedPrecondition):
        await pool.prepare("train", 0)


@pytest.mark.slow
async def test_a_death_costs_one_sample_only(model_folder, tmp_path):
    source = source_of(model_folder, f"{shutil.copy(rows.__file__, tmp_path)}:rows")
    async with SamplePool(source, workers=2, cache_bytes=0) as pool:
        results = await asyncio.gather(
            *(pool.prepare("train", n) for n in (0, 1, 2, 5, 6)), return_exceptions=True
        )
        assert isinstance(results[1], SampleError)
        assert results[1].fault is SampleFault.WORKER_DIED
        assert "train[1]" in str(results[1])
        for number, result in zip((0, 2, 5, 6), (results[0], *results[2:]), strict=True):
            assert json.loads(result.row_json)["n"] == number
        assert pool.deaths == 3  # twice for row 1, once for row 2


async def test_a_late_worker_is_replaced(model_folder):
    async with SamplePool(source_of(model_folder), workers=1, time_limit_s=0.3) as pool:
        pid = json.loads((await pool.prepare("train", 0)).row_json)["pid"]
        with pytest.raises(SampleError, match=r"took over 0\.3 s") as caught:
            await pool.prepare("train", 4)
        assert caught.value.fault is SampleFault.WORKER_DIED
        assert pool.deaths == 2
        assert await gone(pid)


async def test_bad_data_fails_the_start(model_folder):
    pool = SamplePool(source_of(model_folder, train="no.such:rows"), workers=1)
    with pytest.raises(InvalidArgument, match=r"data\.train = 'no\.such:rows'"):
        async with pool:
            pass


async def test_workers_die_with_a_killed_parent(model_folder, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, json, sys\n"
        "from common.data.workers import SamplePool, SampleSource\n"
        "async def main():\n"
        f"    source = SampleSource(model_path={str(model_folder)!r}, "
        f"splits={{'train': {ROWS!r}}}, max_prompt_tokens=100)\n"
        "    async with SamplePool(source, workers=1) as pool:\n"
        "        row = json.loads((await pool.prepare('train', 0)).row_json)\n"
        "        print(row['pid'], flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    parent = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=subprocess.PIPE, env=environment
    )
    try:
        worker = int(await parent.stdout.readline())
    finally:
        parent.send_signal(signal.SIGKILL)
        await parent.communicate()
    assert await gone(worker)
