from __future__ import annotations

import asyncio
import contextlib
import http.client
import signal
import socket
import sys

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.ids import Participant, Service
from common.registry.client import Registry
from common.transport import open_channel

pytestmark = pytest.mark.redis

LEARNER = Participant(service=Service.LEARNER)
DEADLINE_S = 30


class TinyProcess:
    """One tiny service; its output is read line by line."""

    def __init__(self, redis_url, folder, word, *sets):
        self.registry = Registry(redis_url, f"tiny-{word}", deadline_s=DEADLINE_S)
        self._command = [
            *(sys.executable, "-m", "tests.integration.service.tiny"),
            *("--set", f"name=tiny-{word}"),
            *("--set", f"state_dir={folder}"),
            *("--set", f"redis.url={redis_url}"),
            *("--set", "grpc_port_base=0", "--set", "http_port_base=0"),
            *("--set", "deadlines.heartbeat_s=0.1"),
            *(part for item in sets for part in ("--set", item)),
        ]

    async def __aenter__(self):
        self.process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *_):
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()
        await self.registry.close()

    async def serving(self):
        return await self.registry.wait_for(LEARNER, timeout_s=DEADLINE_S)

    async def line(self):
        raw = await asyncio.wait_for(self.process.stdout.readline(), DEADLINE_S)
        return raw.decode().strip()

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    async def ended(self):
        out, err = await asyncio.wait_for(self.process.communicate(), DEADLINE_S)
        return self.process.returncode, out.decode().splitlines(), err.decode()


@pytest.fixture
def tiny(redis_server, tmp_path):
    return lambda word, *sets: TinyProcess(redis_server.url, tmp_path, word, *sets)


def get(address, path):
    host, _, port = address.rpartition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=10)) as connection:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


async def check_health(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    reply = await stub.Check(health_pb2.HealthCheckRequest())
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_serves_until_a_signal_then_ends_in_order(tiny, number):
    async with tiny("plain") as process:
        entry = await process.serving()
        assert (entry.pid, entry.phase) == (process.process.pid, "tiny phase")
        async with open_channel(entry.grpc_address) as channel:
            assert await check_health(channel) == "SERVING"
        assert get(entry.http_address, "/healthz") == (200, "serving\n")
        status, metrics = get(entry.http_address, "/metrics")
        assert status == 200
        assert 'participant="learner/0"' in metrics
        assert "process_open_fds" in metrics
        assert get(entry.http_address, "/nothing")[0] == 404
        process.signal(number)
        process.signal(number)
        code, lines, log = await process.ended()
        assert (code, lines) == (0, ["run", "drain", "drained", "run ended", "close"])
        assert log.count(f"signal={number.name}") >= 1
        assert await process.registry.find(LEARNER) is None
        with pytest.raises(OSError):
            socket.create_connection(tuple(entry.grpc_address.split(":")))


async def test_while_draining_it_is_alive_not_serving_and_not_registered(tiny):
    async with tiny("slow") as process:
        entry = await process.serving()
        async with open_channel(entry.grpc_address) as channel:
            await check_health(channel)
            process.signal()
            assert [await process.line() for _ in range(2)] == ["run", "drain"]
            assert await check_health(channel) == "NOT_SERVING"
            assert get(entry.http_address, "/healthz") == (503, "draining\n")
            assert await process.registry.find(LEARNER) is None
        process.process.stdin.write(b"go on\n")
        assert (await process.ended())[:2] == (0, ["drained", "run ended", "close"])


async def test_drain_is_cut_off_at_its_deadline(tiny):
    async with tiny("stuck", "deadlines.drain_s=0.2") as process:
        await process.serving()
        process.signal()
        code, lines, log = await process.ended()
        assert (code, lines) == (0, ["run", "drain", "run ended", "close"])
        assert "drain deadline passed" in log


@pytest.mark.parametrize(
    ("word", "cause"), [("raises", "KeyError: 'the reason'"), ("returns", "ended by itself")]
)
async def test_failed_service_closes_and_exits_with_1(tiny, word, cause):
    async with tiny(word) as process:
        code, lines, log = await process.ended()
        assert (code, lines) == (1, ["run", "close"])
        assert cause in log
        assert await process.registry.find(LEARNER) is None


async def test_an_unusable_process_closes_nothing(tiny):
    async with tiny("unusable") as process:
        code, lines, log = await process.ended()
        assert (code, lines) == (1, ["run"])
        assert "ProcessUnusable: the reason" in log


async def test_signal_while_starting_stops_the_start(tiny):
    async with tiny("unbuilt") as process:
        assert await process.line() == "building"
        process.signal()
        assert (await process.ended())[:2] == (0, [])


async def test_start_over_its_deadline_fails_by_name(tiny):
    async with tiny("unbuilt", "deadlines.start_s=0.2") as process:
        code, _, log = await process.ended()
        assert code == 1
        assert "learner/0 was not built within deadlines.start_s = 0.2 s" in log


async def test_lives_through_a_killed_redis(tiny, redis_server):
    async with tiny("plain") as process:
        entry = await process.serving()
        redis_server.stop(signal.SIGKILL)
        await asyncio.sleep(0.3)
        assert get(entry.http_address, "/healthz") == (200, "serving\n")
        await redis_server.start()
        assert await process.serving() == entry
        process.signal()
        assert (await process.ended())[0] == 0


async def test_stops_in_time_without_redis(tiny, redis_server):
    async with tiny("plain") as process:
        await process.serving()
        redis_server.stop()
        process.signal()
        code, _, log = await process.ended()
        assert code == 0
        assert "could not deregister" in log


async def test_killed_process_is_gone_from_the_registry_after_its_ttl(tiny):
    async with tiny("plain", "deadlines.registration_ttl_s=0.3") as process:
        await process.serving()
        process.signal(signal.SIGKILL)
        await process.ended()
        async with asyncio.timeout(DEADLINE_S):
            while await process.registry.find(LEARNER) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_older_process_of_a_participant_gives_way(tiny):
    async with tiny("plain") as old:
        first = await old.serving()
        async with tiny("plain") as new:
            code, _, log = await old.ended()
            assert code == 1
            assert "was replaced by a newer process" in log
            second = await new.serving()
            assert (second.pid, second.epoch) == (new.process.pid, first.epoch + 1)


async def test_taken_port_is_named(tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with tiny("plain", f"services.learner.grpc_port={port}") as process:
            code, lines, log = await process.ended()
            assert (code, lines) == (1, ["close"])
            assert f"127.0.0.1:{port}" in log


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("arena_gib=-1", "arena_gib = -1: should be greater than 0"),
        ("services.learner.rank=1", "services.learner.rank: unknown key"),
    ],
)
async def test_wrong_value_exits_with_2_and_its_name(tiny, item, words):
    async with tiny("plain", item) as process:
        code, _, log = await process.ended()
        assert code == 2
        assert words in log
        assert "Traceback" not in log


async def test_process_that_blocks_while_draining_is_cut_off(tiny):
    async with tiny("frozen", "deadlines.drain_s=0.1") as process:
        await process.serving()
        process.signal()
        code, lines, log = await process.ended()
        assert (code, lines) == (1, ["run", "drain"])
        assert "still not stopped, cut off" in log


async def test_garbage_is_collected_but_of_what_was_imported(tiny):
    async with tiny("garbage") as process:
        assert await process.line() == "run"
        assert await process.line() == "True True"
