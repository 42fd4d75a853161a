from __future__ import annotations

import asyncio
import signal
import sys
import tempfile

import pytest

from common.bus import BusClient, Hub, HubRestarted
from common.ids import Incarnation
from tests.unit.bus.events import LEARNER, ROLLOUT, group_event, step_began

DEADLINE_S = 30


@pytest.fixture
def address():
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        yield f"ipc://{folder}/hub.sock"


@pytest.fixture
async def spawn():
    """Starts processes and kills at the end those that still run."""
    processes = []

    async def start(module, *arguments):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"tests.integration.bus.{module}", *arguments),
            stdout=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line(process):
    raw = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
    return raw.decode().split()


async def kill(process):
    process.send_signal(signal.SIGKILL)
    await asyncio.wait_for(process.wait(), DEADLINE_S)


async def take(client, count):
    items = []
    async with asyncio.timeout(DEADLINE_S):
        async for item in client.events():
            items.append(item)
            if len(items) == count:
                break
    return items


async def test_killed_hub_is_reported_and_what_it_never_saw_goes_to_the_next(address, spawn):
    hub = await spawn("hub_process", address)
    (old,) = await line(hub)
    client = BusClient(address, LEARNER, Incarnation("a"), heartbeat_s=0.1)
    await client.start(timeout_s=DEADLINE_S)
    await client.publish(group_event(0))
    assert [event.seq for event in await take(client, 1)] == [1]

    await kill(hub)
    for group in (1, 2, 3):
        await client.publish(group_event(group))
    (new,) = await line(await spawn("hub_process", address))
    notice, *events = await take(client, 4)
    assert notice == HubRestarted(
        old_incarnation=Incarnation(old), new_incarnation=Incarnation(new)
    )
    assert [(event.seq, event.group) for event in events] == [(1, 1), (2, 2), (3, 3)]
    await client.close()


async def test_hub_killed_amid_publications_loses_none_and_repeats_none(address, spawn):
    count = 400
    client = BusClient(address, LEARNER, Incarnation("a"), heartbeat_s=0.1)
    hub = await spawn("hub_process", address)
    await client.start(timeout_s=DEADLINE_S)
    publishing = asyncio.create_task(publish_all(client, count))
    await line(hub)
    for _ in range(20):
        await line(hub)
    await kill(hub)
    await spawn("hub_process", address)

    seen, seqs = [], []
    async with asyncio.timeout(DEADLINE_S):
        async for item in client.events():
            if isinstance(item, HubRestarted):
                seqs.clear()
                continue
            seen.append(item.group)
            seqs.append(item.seq)
            if item.group == count - 1:
                break
    await publishing
    # The one event under way when the hub died may have a place in both orders.
    assert sorted(set(seen)) == list(range(count))
    assert len(seen) <= count + 1
    assert seen == sorted(seen)
    assert seqs == list(range(1, len(seqs) + 1))
    await client.close()


async def publish_all(client, count):
    for group in range(count):
        await client.publish(group_event(group))


async def test_killed_subscriber_holds_up_nobody_and_its_successor_gets_the_step(address, spawn):
    hub = Hub(address)
    await hub.start()
    hub.publish(step_began(1))
    doomed = await spawn("client_process", address, "rollout/0", "0")
    assert await line(doomed) == ["1", "step-1"]
    await kill(doomed)

    client = BusClient(address, LEARNER, Incarnation("a"), heartbeat_s=0.1)
    await client.start(timeout_s=DEADLINE_S)
    await publish_all(client, 50)
    assert [event.seq for event in await take(client, 51)] == list(range(1, 52))

    successor = await spawn("client_process", address, str(ROLLOUT), "0")
    assert [int((await line(successor))[0]) for _ in range(51)] == list(range(1, 52))
    await client.close()
    await hub.close()


async def test_stopped_subscriber_catches_up_without_a_hole(address, spawn):
    hub = Hub(address)
    await hub.start()
    sleeper = await spawn("client_process", address, "rollout/0", "0")
    async with asyncio.timeout(DEADLINE_S):
        while "rollout/0" not in hub.subscribers:  # noqa: ASYNC110 - the hub tells nobody
            await asyncio.sleep(0.02)
    sleeper.send_signal(signal.SIGSTOP)
    for group in range(2000):
        hub.publish(group_event(group))
    sleeper.send_signal(signal.SIGCONT)
    assert [int((await line(sleeper))[0]) for _ in range(2000)] == list(range(1, 2001))
    await hub.close()


async def test_publishers_in_many_processes_share_one_order(address, spawn):
    hub = Hub(address)
    await hub.start()
    names = ("rollout/0", "reference/0", "learner/0")
    count = 60
    clients = [await spawn("client_process", address, name, str(count)) for name in names]
    orders = [[await line(client) for _ in range(count * len(names))] for client in clients]
    assert orders[0] == orders[1] == orders[2]
    assert [int(seq) for seq, _ in orders[0]] == list(range(1, count * len(names) + 1))
    for name in names:
        mine = [event_id for _, event_id in orders[0] if event_id.startswith(name)]
        assert mine == [f"{name}-1-{group}" for group in range(count)]
    await hub.close()
