from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from common.config.base import ConfigError
from common.config.deployment import load_deployment
from common.errors import FailedPrecondition, Unavailable
from deploy.local.__main__ import main
from deploy.local.logs import follow, tail
from deploy.local.node import status, up
from deploy.local.precheck import PrecheckFailed, check, memory_problems
from deploy.local.supervisor import Supervisor

pytestmark = pytest.mark.redis

FLEET = "tests.integration.service.fleet"
DEADLINE_S = 40


@pytest.fixture
def folder():
    # A name that the supervisor's configuration has to quote.
    with tempfile.TemporaryDirectory(prefix="rp ") as name:
        yield Path(name)


@pytest.fixture
def node(folder):
    """Makes deployments in `folder`; what runs there at the end is stopped."""
    made = []

    def make(word="plain", *sets):
        deployment = load_deployment(
            None,
            [
                f"name=tiny-{word}",
                f"state_dir={folder}/state",
                "grpc_port_base=0",
                "http_port_base=0",
                "arena_gib=0.01",
                "deadlines.heartbeat_s=0.2",
                *sets,
            ],
        )
        made.append(deployment)
        return deployment

    yield make
    if made:
        Supervisor(made[0]).stop()


def options(deployment, *sets):
    items = (f"name={deployment.name}", f"state_dir={deployment.state_dir}", *sets)
    return [part for item in items for part in ("--set", item)]


def wait_until(holds):
    give_up_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.1)


def row_of(deployment, name):
    return next(row for row in status(deployment) if row.program.name == name)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_up_restart_down(node, capsys):
    deployment = node()
    rows = up(deployment, package=FLEET)
    assert [row.program.name for row in rows] == [
        "redis",
        *("broker-0", "controller-0", "rollout-0", "prefix-encoder-0", "reference-0", "learner-0"),
    ]
    assert {row.health for row in rows} == {"serving"}
    pids = {row.state.pid for row in rows}
    supervisor_pid = Supervisor(deployment).pid()

    assert main(["status", *options(deployment)]) == 0
    assert "prefix-encoder/0" in capsys.readouterr().out
    assert main(["logs", "learner/0", *options(deployment)]) == 0
    assert " learner/0 serving " in capsys.readouterr().out
    assert up(deployment, package=FLEET)
    assert Supervisor(deployment).pid() == supervisor_pid
    with pytest.raises(FailedPrecondition, match="another configuration"):
        up(node("plain", "log_level=debug"), package=FLEET)

    for name in ("learner-0", "redis"):
        old = row_of(deployment, name).state.pid
        os.kill(old, signal.SIGKILL)

        def is_back(name=name, old=old):
            row = row_of(deployment, name)
            return row.health == "serving" and row.state.pid != old

        wait_until(is_back)
        row = row_of(deployment, name)
        assert row.state.restarts == 1
        pids.add(row.state.pid)
    wait_until(lambda: {row.health for row in status(deployment)} == {"serving"})

    assert main(["down", *options(deployment)]) == 0
    assert main(["down", *options(deployment)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "all services are stopped",
        "nothing was running",
    ]
    assert not [pid for pid in (*pids, supervisor_pid) if psutil.pid_exists(pid)]
    assert main(["status", *options(deployment)]) == 1
    assert list((deployment.state_dir / "run").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_service_that_does_not_start_is_named_with_its_log(node):
    deployment = node("no-learner")
    with pytest.raises(Unavailable) as caught:
        up(deployment, package=FLEET)
    text = str(caught.value)
    assert "learner-0: " in text
    assert "no such model" in text
    assert Supervisor(deployment).stop()


def test_everything_wrong_is_reported_before_anything_starts(node, folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        deployment = node(
            "plain",
            f"services.learner.grpc_port={port}",
            f"services.rollout.http_port={port}",
            "arena_gib=1e6",
            f"redis.url=unix://{folder}/none.sock",
            f"engine_python={folder}/no/python",
        )
        with pytest.raises(PrecheckFailed) as caught:
            up(deployment, package="tests.integration.service.absent")
    text = str(caught.value)
    assert f"services.learner.grpc_port = {port}: is the port of services.rollout.http_port" in text
    assert f"services.rollout.http_port = {port}: 127.0.0.1 cannot listen on it" in text
    assert f"held by pid {os.getpid()}" in text
    assert "arena_gib = 1e+06" in text
    assert "none.sock" in text
    assert "/no/python' is no program" in text
    assert "absent.learner.__main__, cannot be found" in text
    assert Supervisor(deployment).pid() is None
    assert not (deployment.state_dir / "supervisord.conf").exists()


def test_state_dir_that_is_not_a_folder_is_named(node, folder):
    (folder / "state").write_text("")
    with pytest.raises(PrecheckFailed, match="state_dir = "):
        check(node(), package=FLEET)


def test_arena_just_fits_or_does_not(node):
    deployment = node("plain", "arena_gib=1")
    assert list(memory_problems(deployment, 2**30)) == []
    assert "arena_gib = 1:" in next(iter(memory_problems(deployment, 2**30 - 1)))


def test_pid_file_of_an_ended_supervisor_harms_nobody(node):
    deployment = node()
    deployment.make_dirs()
    (deployment.state_dir / "supervisord.pid").write_text(f"{os.getpid()}\n")
    assert Supervisor(deployment).pid() is None
    assert Supervisor(deployment).stop() is False


def test_unknown_service_and_bad_value_exit_with_2(node, capsys):
    deployment = node()
    assert main(["logs", "lerner", *options(deployment)]) == 2
    assert "legal are redis, broker-0" in capsys.readouterr().err
    assert main(["up", *options(deployment, "arena_gib=0")]) == 2
    assert "arena_gib = 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a ;b", "a%b", "a\nb"])
def test_folder_that_the_supervisor_cannot_hold_is_refused(node, name):
    with pytest.raises(ConfigError, match="state_dir"):
        Supervisor(node()).start(package=FLEET, folder=Path("/") / name)


def test_followed_log_continues_over_rotation(folder):
    path = folder / "x.log"
    path.write_text("one\ntwo\nthree\nhal")
    lines = follow([path], 2)
    assert [next(lines), next(lines)] == ["two", "three"]
    with path.open("a") as file:
        file.write("f\nfour\n")
    assert [next(lines), next(lines)] == ["half", "four"]
    path.rename(folder / "x.log.1")
    path.write_text("five\n")
    assert next(lines) == "five"
    assert tail(path, 5) == ["five"]
    assert tail(folder / "absent", 5) == []


def test_default_deployment_file_holds_the_defaults(monkeypatch):
    monkeypatch.delenv("ROLLPLEX_STATE_DIR", raising=False)
    monkeypatch.delenv("ROLLPLEX_CONFIG", raising=False)
    root = Path(sys.modules["deploy.local"].__file__).parent
    assert load_deployment(root / "rollplex.toml") == load_deployment()
