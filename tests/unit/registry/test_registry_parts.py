from __future__ import annotations

import asyncio
import os
import stat

import pytest

from common.config.deployment import load_deployment
from common.errors import FailedPrecondition, Unavailable
from common.ids import Incarnation, Participant, RunId, Service
from common.registry import connection, embedded, keys
from common.registry.client import ServiceEntry
from common.registry.connection import RedisBroken, RedisRefused, redacted, retry_redis
from common.registry.embedded import embedded_server, find_server

LEARNER = Participant(service=Service.LEARNER)


def test_every_key_is_in_the_table_of_the_module():
    made = keys.Keys("<name>")
    run = RunId("<run>")
    for key in (
        made.runs,
        made.request("<request id>"),
        made.record(run),
        made.durable(run),
        made.journal(run),
    ):
        assert f"`{key}`" in keys.__doc__
    assert made.service(LEARNER) == "rollplex:<name>:service:learner/0"
    assert made.service_epoch(LEARNER) == "rollplex:<name>:service-epoch:learner/0"


def test_entry_survives_its_json_and_garbage_is_named():
    entry = ServiceEntry(
        participant=LEARNER,
        node="n",
        pid=1,
        grpc_address="h:1",
        http_address="h:2",
        incarnation=Incarnation("i"),
        epoch=3,
        serving=True,
        phase="idle",
    )
    assert ServiceEntry.from_json(entry.to_json()) == entry
    for text in ("", "[]", "{}", '{"participant": "learner/0"}', '{"participant": "x/0"}'):
        with pytest.raises(RedisBroken, match="cannot be read"):
            ServiceEntry.from_json(text)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://u:secret@h:1/0", "redis://u:***@h:1/0"),
        ("rediss://:secret@h", "rediss://:***@h"),
        ("unix:///run/r.sock", "unix:///run/r.sock"),
    ],
)
def test_password_is_not_shown(url, shown):
    assert redacted(url) == shown


async def test_operation_is_repeated_while_redis_is_away():
    answers = [ConnectionError("down"), TimeoutError("slow"), 7]

    async def operation():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await retry_redis(operation, what="w", url="redis://h") == 7


async def test_redis_that_does_not_answer_is_away(monkeypatch):
    monkeypatch.setattr(connection, "ANSWER_S", 0.01)
    asked = []

    async def operation():
        asked.append(1)
        await asyncio.Event().wait()

    with pytest.raises(Unavailable, match="reading: Redis at redis://h could not be reached"):
        await retry_redis(operation, what="reading", url="redis://h", deadline_s=0.3)
    assert len(asked) > 1


async def test_deadline_ends_the_repetition_without_showing_the_password():
    async def operation():
        raise ConnectionError("down")

    with pytest.raises(Unavailable, match=r"reading: Redis at redis://u:\*\*\*@h .*down"):
        await retry_redis(operation, what="reading", url="redis://u:pw@h", deadline_s=0.1)


async def test_refusal_is_not_repeated():
    from redis.exceptions import AuthenticationError, ResponseError

    for error in (AuthenticationError("no"), ResponseError("WRONGTYPE")):
        calls = []

        async def operation(error=error, calls=calls):
            calls.append(1)
            raise error

        with pytest.raises(RedisRefused, match="reading: Redis at redis://h"):
            await retry_redis(operation, what="reading", url="redis://h")
        assert calls == [1]


def program(folder, name):
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_server_on_path_comes_before_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "search_path", lambda: str(tmp_path))
    packaged = find_server()
    assert os.access(packaged, os.X_OK)
    redis = program(tmp_path, "redis-server")
    assert find_server() == redis
    valkey = program(tmp_path, "valkey-server")
    assert find_server() == valkey


def test_without_any_server_the_remedy_is_named(tmp_path, monkeypatch):
    def absent():
        raise embedded.ValkeyBinaryNotFoundError("no binary for this machine")

    monkeypatch.setattr(embedded, "search_path", lambda: str(tmp_path))
    monkeypatch.setattr(embedded, "get_binary_path", absent)
    with pytest.raises(FailedPrecondition, match=r"valkey-server nor redis-server .*redis\.url"):
        find_server()


def test_embedded_server_writes_to_disk_and_listens_on_its_socket_only(tmp_path):
    deployment = load_deployment(None, [f"state_dir={tmp_path}"])
    command = embedded_server(deployment).command
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendfsync"] == "always"
    assert options["--port"] == "0"
    assert options["--unixsocket"] == str(deployment.redis_socket)
    assert options["--bind"] == "127.0.0.1"
    assert embedded_server(load_deployment(None, ["redis.url=redis://h:1"])) is None
