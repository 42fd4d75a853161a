"""The engine's processes: ended in order, by force, with their service, and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from common.vlm.tiny import tiny_prompt
from services.rollout.engines.errors import EngineGone
from tests.integration.runs.node import children, gone
from tests.sglang.policy import SAMPLES, Policy, run_step

pytestmark = pytest.mark.sglang

GONE_S = 20.0
SILENCE_S = 20.0
SERVICE = """
    import json, sys, time
    from pathlib import Path
    from tests.sglang.policy import Policy

    model, python, folder = map(Path, sys.argv[1:])
    engine = Policy.of(model).engine(python, folder)
    engine.prepare()
    print(json.dumps(engine.driver.pid), flush=True)
    time.sleep(1000)
"""


def group_of(host: int) -> set[int]:
    """Pids of a process group."""
    return {pid for pid in psutil.pids() if _group(pid) == host}


def wait_for_ever(engine) -> None:
    while True:
        engine.run_iteration()


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def test_a_killed_service_leaves_no_process(folder, engine_python, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(SERVICE)]
    command += map(str, (folder, engine_python, tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        host = json.loads(service.stdout.readline())
        processes = group_of(host)
        assert len(processes) > 2
        service.kill()
    assert asyncio.run(gone(processes, within_s=GONE_S)) == set()


@pytest.mark.parametrize("processes", [1, 3], ids=["the host alone", "with SGLang's own"])
def test_a_service_killed_while_they_start_leaves_no_process(
    processes, folder, engine_python, tmp_path
):
    command = [sys.executable, "-c", textwrap.dedent(SERVICE)]
    command += map(str, (folder, engine_python, tmp_path))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as service:
        started: set[int] = set()
        while len(started) < processes:
            time.sleep(0.01)
            hosts = [pid for pid in children(service.pid) if _group(pid) == pid]
            started = set().union(*map(group_of, hosts))
        service.kill()
    assert asyncio.run(gone(started, within_s=GONE_S)) == set()
    # nor one that came after the look
    assert asyncio.run(gone(set().union(*map(group_of, hosts)), within_s=GONE_S)) == set()


def test_a_silent_engine_is_ended_and_started_again(folder, engine_python, tmp_path):
    with Policy.of(folder) as policy:
        engine = policy.engine(engine_python, tmp_path, deadline_s=SILENCE_S)
        prompt = tiny_prompt(policy.config, seed=1)
        try:
            engine.prepare()
            assert engine.trouble == ""
            processes = group_of(engine.driver.pid)
            engine.begin_step(policy.spec(max_new_tokens=300))
            engine.add_group(policy.request(0, prompt))
            engine.admit_next()
            os.killpg(engine.driver.pid, signal.SIGSTOP)
            with pytest.raises(EngineGone, match="no token within"):
                wait_for_ever(engine)
            assert asyncio.run(gone(processes, within_s=GONE_S)) == set()
            assert "have ended" in engine.trouble
            engine.abort()
            (finished,) = run_step(engine, policy.spec(), [policy.request(0, prompt)])
            assert finished.lengths.tolist() == [6] * SAMPLES
            assert engine.trouble == ""
            processes = group_of(engine.driver.pid)
        finally:
            engine.close()
        assert asyncio.run(gone(processes, within_s=GONE_S)) == set()
