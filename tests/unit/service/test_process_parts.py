from __future__ import annotations

import contextlib
import http.client
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from prometheus_client import CollectorRegistry, Counter

from common.config.deployment import load_deployment
from common.errors import FailedPrecondition
from common.ids import Participant, Service
from common.service import context as context_module
from common.service.arguments import parse_arguments
from common.service.context import ServiceContext
from common.service.http import HttpServer, Verdict
from common.service.lifecycle import Lifecycle
from common.service.logs import LineFormatter
from common.service.parent_watch import die_with_parent

LEARNER = Participant(service=Service.LEARNER, rank=1)


@pytest.fixture
async def context(tmp_path):
    context = ServiceContext(LEARNER, load_deployment(None, [f"state_dir={tmp_path}"]))
    yield context
    await context.registry.close()


def test_log_record_is_one_line_with_its_values():
    record = logging.makeLogRecord(
        {
            "msg": "lease %s\nfreed",
            "args": (17,),
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "created": 0.5,
            "msecs": 500,
            "run": "r1",
            "why": "two words",
            "empty": "",
            "lines": "a\nb",
        }
    )
    assert LineFormatter(LEARNER).format(record) == (
        "1970-01-01T00:00:00.500Z warning learner/1 lease 17\\nfreed "
        "run=r1 why='two words' empty='' lines=a\\nb"
    )


def test_log_record_with_an_error_has_its_traceback():
    try:
        {}["the reason"]
    except KeyError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    first, *rest = LineFormatter("x").format(record).splitlines()
    assert first.endswith("x failed")
    assert rest[-1] == "KeyError: 'the reason'"


def test_arguments_are_read_in_order(tmp_path):
    arguments = parse_arguments(
        Service.PREFIX_ENCODER,
        ["--config", str(tmp_path / "f.toml"), "--set", "a=1", "--set", "b=2", "--rank", "3"],
    )
    assert str(arguments.participant) == "prefix-encoder/3"
    assert (arguments.config, arguments.sets) == (tmp_path / "f.toml", ("a=1", "b=2"))
    assert parse_arguments(Service.BROKER, []).config is None


@pytest.mark.parametrize("argv", [["--rank", "-1"], ["--rank", "x"], ["--unknown"]])
def test_wrong_arguments_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(Service.BROKER, argv)
    assert caught.value.code == 2
    assert "services.broker" in capsys.readouterr().err


async def test_stalled_loop_is_not_healthy(context, monkeypatch):
    assert context.health() == Verdict(healthy=False, reason="created")
    context.lifecycle.move(Lifecycle.STARTING, "test")
    context.lifecycle.move(Lifecycle.SERVING, "test")
    assert context.health() == Verdict(healthy=True, reason="serving")
    monkeypatch.setattr(context_module, "STALLED_AFTER_S", -1.0)
    verdict = context.health()
    assert not verdict.healthy
    assert "stalled" in verdict.reason
    monkeypatch.undo()
    context.beat(0.25)
    assert context.health().healthy
    assert context.metrics.get_sample_value("rollplex_event_loop_lag_seconds") == 0.25


async def test_phase_is_the_lifecycle_until_the_service_says_more(context):
    assert context.phase == "created"
    context.set_phase("decode")
    assert context.entry(grpc_address="h:1", http_address="h:2").phase == "decode"


async def test_address_for_all_interfaces_is_shown_by_node_name(context):
    entry = context.entry(grpc_address="0.0.0.0:1", http_address="127.0.0.1:2")
    assert entry.grpc_address == f"{context.deployment.node}:1"
    assert entry.http_address == "127.0.0.1:2"


def test_http_answers_health_metrics_and_nothing_else():
    metrics = CollectorRegistry()
    Counter("things", "Things.", registry=metrics).inc(3)
    verdicts = [Verdict(healthy=True, reason="serving"), Verdict(healthy=False, reason="draining")]
    server = HttpServer("127.0.0.1:0", metrics, lambda: verdicts.pop(0))
    host, _, port = server.address.rpartition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=10)) as connection:

        def get(path):
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()

        assert get("/healthz") == (200, "serving\n")
        assert get("/healthz?x=1") == (503, "draining\n")
        assert "things_total 3.0" in get("/metrics")[1]
        assert get("/")[0] == 404
    server.close()
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)))


def test_taken_http_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FailedPrecondition, match=f"{address}.*http_port"):
            HttpServer(address, CollectorRegistry(), lambda: Verdict(healthy=True, reason=""))


def _sleep_for_ever():
    die_with_parent()
    time.sleep(600)


def test_spawned_child_dies_with_a_killed_parent():
    code = (
        "import multiprocessing as mp, time\n"
        "from tests.unit.service.test_process_parts import _sleep_for_ever\n"
        "if __name__ == '__main__':\n"
        "    child = mp.get_context('spawn').Process(target=_sleep_for_ever)\n"
        "    child.start()\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    child.wait(30)


def test_without_a_parent_there_is_nothing_to_watch():
    assert multiprocessing.parent_process() is None
    die_with_parent()
    assert psutil.pid_exists(os.getpid())


async def test_trouble_of_a_serving_process_is_no_health(context):
    for state in (Lifecycle.STARTING, Lifecycle.SERVING):
        context.lifecycle.move(state, "a test")
    context.set_trouble("its engine has ended")
    assert context.health() == Verdict(healthy=False, reason="its engine has ended")
    context.set_trouble("")
    assert context.health() == Verdict(healthy=True, reason="serving")
