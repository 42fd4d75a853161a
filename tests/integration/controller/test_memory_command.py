"""`rollplex memory` against a real controller, broker and participants."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import pytest
from PIL import Image

from common.errors import Unavailable
from common.tensors.spec import Held
from tests.integration.broker.conftest import (
    ENCODER,
    LEARNER,
    SETTLE_S,
    connected,
    start_broker,
    stop,
)
from tests.integration.broker.test_client import PAGE, allocate
from tests.integration.controller.conftest import DEPLOYMENT

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(180)]

MIB = 1 << 20


@pytest.fixture
async def broker(redis_server, tmp_path):
    """Registered where the controller looks."""
    folder = tmp_path / "broker"
    folder.mkdir()
    started = start_broker(folder, name=DEPLOYMENT, redis={"url": redis_server.url})
    try:
        async with connected(started) as broker:
            yield broker
    finally:
        stop(started.process)


@pytest.fixture
async def client(controller, broker):
    """Of a controller that knows the broker."""
    controller.start()
    async with await controller.client() as client:
        async with asyncio.timeout(SETTLE_S):
            await until_registered(client)
        yield client


async def until_registered(client):
    while True:
        if "broker/0" in [entry.participant for entry in (await client.cluster()).services]:
            return
        await asyncio.sleep(0.05)


def command(controller, *arguments):
    return asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollplex.cli", "--address", controller.address, "memory"),
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # Where the tests run in the background, their children would ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


async def printed(controller, *arguments, code=0):
    process = await command(controller, *arguments)
    try:
        out, err = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == code, err.decode()
    return out.decode() if code == 0 else err.decode()


async def test_who_holds_what_until_when(client, controller, broker, tmp_path):
    learner, encoder = broker.clients[0], await broker.join(ENCODER)
    lease = await allocate(encoder, LEARNER)
    await learner.reserve("run", "workspace", 2 * PAGE)
    encoder.report_held(Held.ALLOCATOR, 5 * MIB)
    learner.report_held(Held.CONTEXT, 3 * MIB)
    await broker.held(8 * MIB)

    ledger = await client.ledger()
    assert ledger.by_series() == {
        "kv": PAGE,
        "workspace": 2 * PAGE,
        "prefix-encoder/0 allocator": 5 * MIB,
        "learner/0 context": 3 * MIB,
    }
    arena = ledger.arena()
    assert (arena.used_bytes, arena.held_bytes) == (3 * PAGE, 8 * MIB)
    assert arena.free_bytes == arena.capacity_bytes - arena.total_bytes

    text = await printed(controller)
    rows = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line}
    assert f"{arena.capacity_bytes // MIB}.00 MiB 12.00 KiB 8.00 MiB" in rows["cpu"]
    assert "5.00 MiB cpu held own prefix-encoder/0" in rows["allocator"]
    assert "learner/0 ends" in rows["context"]
    assert "kv 1 4.00 KiB cpu allocated phase prefix-encoder/0" in rows["kv"]
    assert "learner/0 gives it back" in rows["workspace"]

    tree = json.loads(await printed(controller, "--json"))
    assert sum(entry["size_bytes"] for entry in tree["entries"]) == 3 * PAGE + 8 * MIB

    png = tmp_path / "memory.png"
    series = json.loads(await printed(controller, "--png", png, "--seconds", "0.5", "--json"))
    assert len(series["totals"]) >= 2
    assert set(series["totals"]) == {3 * PAGE + 8 * MIB}
    sums = [sum(values) for values in zip(*series["classes"].values(), strict=True)]
    assert sums == series["totals"]
    with Image.open(png) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 500
    lease.abandon("a test")


async def test_watch_goes_on_until_it_is_interrupted(client, controller, broker):
    process = await command(controller, "--watch", "--json")
    try:
        async with asyncio.timeout(60):
            first = json.loads(await process.stdout.readline())
            broker.clients[0].report_held(Held.ALLOCATOR, MIB)
            while True:
                later = json.loads(await process.stdout.readline())
                if later["arenas"][0]["held_bytes"]:
                    break
            assert first["arenas"][0]["held_bytes"] == 0
            process.send_signal(signal.SIGINT)
            await process.communicate()
        assert process.returncode == 130
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_wrong_options_and_a_lost_broker(client, controller, broker, tmp_path):
    assert "end in .png" in await printed(controller, "--png", tmp_path / "a.jpg", code=2)
    assert "no folder" in await printed(controller, "--png", tmp_path / "no" / "a.png", code=2)
    together = ("--watch", "--png", tmp_path / "a.png")
    assert "do not go together" in await printed(controller, *together, code=2)
    assert (await client.ledger()).entries == ()
    stop(broker.process)
    with pytest.raises(Unavailable):
        await client.ledger()
    with pytest.raises(Unavailable):
        await client.ledger()
