"""A real controller process, a real Redis, scripted peers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from common.errors import Unavailable
from common.ids import RunId
from common.registry.runs import RunLedger
from rollplex import Client
from services.controller.record import RunRecord
from services.controller.store import Store
from tests.integration.controller.peers import Node
from tests.integration.registry.server import RedisServer

DEPLOYMENT = "test"


def recipe(**training) -> dict:
    return {
        "name": "tiny",
        "model": {"path": "/no/model"},
        "data": {"train": "examples.digits.data:train", "eval": "examples.digits.data:held_out"},
        "rollout": {"max_new_tokens": 1, "samples_per_group": 2},
        "reward": {"functions": [{"function": "examples.digits.reward:exact_match"}]},
        "algorithm": {},
        "training": {"steps": 3, "prompts_per_step": 2, "eval_prompts": 2} | training,
    }


class Controller:
    """One controller process at a time, always at the same address."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.log = folder / "controller.log"
        self.process: subprocess.Popen | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        (folder / "state").mkdir()
        self.config = folder / "deployment.toml"
        self.config.write_text(
            f'name = "{DEPLOYMENT}"\nstate_dir = "{folder}/state"\nhttp_port_base = 0\n'
            f'grpc_port_base = 0\nredis = {{url = "{url}"}}\n'
            f"services.controller.grpc_port = {port}\n"
        )
        (folder / "state" / "controller.toml").write_text(
            "gather_interval_s = 0.05\n[failures]\nservices_deadline_s = 20\nbackoff_s = 0.01\n"
            "max_restarts_in_a_row = 3\n"
        )

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.controller", "--config", str(self.config)],
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(20)
        self.process = None
        return code

    async def client(self) -> Client:
        for _ in range(200):
            try:
                return await Client.connect(self.address)
            except Unavailable:
                assert self.process is None or self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.1)
        raise AssertionError(self.log.read_text())


@pytest.fixture
async def redis_server():
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        server = RedisServer(Path(folder))
        await server.start()
        yield server
        server.stop()


@pytest.fixture
async def node(redis_server):
    node = Node(url=redis_server.url, deployment=DEPLOYMENT)
    await node.start()
    yield node
    await node.stop()


@pytest.fixture
async def controller(redis_server, tmp_path):
    controller = Controller(tmp_path, redis_server.url)
    yield controller
    if controller.process is not None:
        controller.end(signal.SIGKILL)
    if controller.log.exists():
        assert "Traceback" not in controller.log.read_text()


@pytest.fixture
async def queue_run(redis_server, tmp_path):
    """Put a run into the ledger as CreateRun would, without its checks."""
    store = Store(RunLedger(redis_server.url, DEPLOYMENT))
    number = 0

    async def queue(*, on_error="default", **training) -> RunId:
        nonlocal number
        number += 1
        run_dir = tmp_path / f"run-{number}"
        run_dir.mkdir()
        tree = recipe(**training)
        tree["reward"]["on_error"] = on_error
        await store.create(
            RunRecord(
                run_id=RunId(f"run-{number}"),
                recipe_json=json.dumps(tree),
                run_dir=str(run_dir),
                steps_total=tree["training"]["steps"],
                train_rows=100,
                eval_rows=5,
                created_unix_ms=number,
            )
        )
        return RunId(f"run-{number}")

    yield queue
    await store.close()
