from __future__ import annotations

import asyncio
import os
import stat

import pytest
import zmq
import zmq.asyncio

from common.bus import BusClient, BusRefused, Hub, HubRestarted, SequenceGap
from common.bus import client as client_module
from common.errors import FailedPrecondition, Unavailable
from common.ids import Incarnation
from protos.rollplex.v1 import events_pb2
from tests.unit.bus.events import LEARNER, ROLLOUT, group_event, step_began

HEARTBEAT_S = 0.05


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/hub.sock"


@pytest.fixture
async def hub(address):
    hub = Hub(address)
    await hub.start()
    yield hub
    await hub.close()


@pytest.fixture
async def join(address):
    """Starts clients and closes them at the end."""
    clients = []

    async def start(participant=LEARNER, incarnation="a"):
        client = BusClient(address, participant, Incarnation(incarnation), heartbeat_s=HEARTBEAT_S)
        clients.append(client)
        await client.start(timeout_s=10)
        return client

    yield start
    for client in clients:
        await client.close(linger_s=0)


async def take(client, count):
    """The next `count` things that the client reads."""
    items = []
    async with asyncio.timeout(10):
        async for item in client.events():
            items.append(item)
            if len(items) == count:
                break
    return items


def seqs(events):
    return [event.seq for event in events]


async def test_all_subscribers_get_one_order_the_publisher_too(hub, join):
    one, two = await join(LEARNER), await join(ROLLOUT)
    await asyncio.gather(
        *(one.publish(group_event(g, sender=LEARNER)) for g in range(20)),
        *(two.publish(group_event(g, sender=ROLLOUT)) for g in range(20)),
    )
    first, second = await take(one, 40), await take(two, 40)
    assert first == second
    assert seqs(first) == list(range(1, 41))
    for sender in (LEARNER, ROLLOUT):
        assert [e.group for e in first if e.sender == sender] == list(range(20))


async def test_socket_is_private(hub, address):
    mode = os.stat(address.removeprefix("ipc://")).st_mode
    assert stat.S_IMODE(mode) == 0o600


async def test_late_joiner_begins_with_the_running_step(hub, join):
    for event in (step_began(1), group_event(0), step_began(2), group_event(1, epoch=2)):
        hub.publish(event)
    client = await join()
    assert [event.event_id for event in await take(client, 2)] == ["step-2", "learner/0-2-1"]


async def test_events_of_the_hubs_own_process_are_ordered_at_once(hub, join):
    client = await join()
    assert [hub.publish(group_event(g)) for g in (0, 1, 0)] == [1, 2, 1]
    assert seqs(await take(client, 2)) == [1, 2]


async def test_repeated_event_id_gets_no_second_place(hub, join):
    client = await join()
    for _ in range(3):
        await client.publish(group_event(0))
    await client.publish(group_event(1))
    assert [event.group for event in await take(client, 2)] == [0, 1]
    assert hub.head_seq == 2


async def test_fenced_event_is_dropped_and_its_publisher_stops_sending(address, join):
    asked = []

    def admit(event):
        asked.append(event.event_id)
        return event.epoch >= 2

    hub = Hub(address, admit=admit)
    await hub.start()
    client = await join()
    await client.publish(group_event(0, epoch=1))
    await client.publish(group_event(0, epoch=2))
    assert [event.epoch for event in await take(client, 1)] == [2]
    await asyncio.sleep(6 * HEARTBEAT_S)
    assert asked == ["learner/0-1-0", "learner/0-2-0"]
    await hub.close()


async def test_unreadable_event_ends_its_publisher_only(hub, join):
    good, bad = await join(ROLLOUT), await join(LEARNER)
    message = events_pb2.Event(event_id="x", schema_version=99, sender="learner/0")
    bad._pending["x"] = events_pb2.HubRequest(publish=message).SerializeToString()
    bad._send_oldest()
    with pytest.raises(BusRefused, match="schema version 99"):
        await take(bad, 1)
    with pytest.raises(BusRefused):
        await bad.publish(group_event(0))
    await good.publish(group_event(1, sender=ROLLOUT))
    assert seqs(await take(good, 1)) == [1]


async def test_subscriber_dropped_by_the_hub_gets_the_rest_by_replay(hub, join):
    client = await join()
    hub.publish(group_event(0))
    await take(client, 1)
    hub._peers.clear()
    for group in (1, 2):
        hub.publish(group_event(group))
    assert seqs(await take(client, 2)) == [2, 3]
    assert hub.subscribers == {"learner/0"}


async def test_lost_tail_is_found_by_the_heartbeat(hub, join, monkeypatch):
    client = await join()
    send = hub._send
    monkeypatch.setattr(hub, "_send", lambda *_: True)
    hub.publish(group_event(0))
    monkeypatch.setattr(hub, "_send", send)
    assert seqs(await take(client, 1)) == [1]


async def test_lost_middle_is_asked_for_again(hub, join, monkeypatch):
    client = await join()
    send = hub._send
    monkeypatch.setattr(hub, "_send", lambda *_: True)
    hub.publish(group_event(0))
    monkeypatch.setattr(hub, "_send", send)
    hub.publish(group_event(1))
    assert seqs(await take(client, 2)) == [1, 2]


async def test_lost_publication_is_sent_again_and_later_ones_stay_behind_it(hub, join, monkeypatch):
    client = await join()
    accept, lost = hub._accept, []

    def lose_first(routing_id, message):
        if lost:
            accept(routing_id, message)
        else:
            lost.append(message.event_id)

    monkeypatch.setattr(hub, "_accept", lose_first)
    for group in range(3):
        await client.publish(group_event(group))
    assert [event.group for event in await take(client, 3)] == [0, 1, 2]
    assert lost == ["learner/0-1-0"]


async def test_subscriber_away_for_too_long_gets_a_gap_error(address, join):
    hub = Hub(address, kept_limit=3)
    await hub.start()
    client = await join()
    hub.publish(group_event(0))
    await take(client, 1)
    hub._peers.clear()
    for group in range(1, 9):
        hub.publish(group_event(group))
    with pytest.raises(SequenceGap, match=r"saw events up to 1 .* can still get is"):
        await take(client, 8)
    with pytest.raises(SequenceGap):
        await client.publish(group_event(9))
    await hub.close()


async def test_new_hub_is_reported_and_unseen_publications_go_to_it(address, join):
    old = Hub(address)
    await old.start()
    client = await join()
    old.publish(group_event(0))
    await take(client, 1)
    await old.close()
    await client.publish(group_event(1))
    await client.publish(group_event(2))
    assert not [e async for e in old.subscribe(0) if e.group != 0]
    new = Hub(address)
    await new.start()
    notice, *events = await take(client, 3)
    assert notice == HubRestarted(old_incarnation=old.incarnation, new_incarnation=new.incarnation)
    assert [(event.seq, event.group) for event in events] == [(1, 1), (2, 2)]
    await new.close()


async def test_new_process_of_a_participant_replaces_the_old_one(hub, join):
    await join(LEARNER, "old")
    await join(LEARNER, "new")
    hub.publish(group_event(0))
    assert [peer.incarnation for peer in hub._peers.values()] == ["new"]


async def test_publisher_waits_while_too_much_is_unseen(hub, join, monkeypatch):
    monkeypatch.setattr(client_module, "PENDING_EVENTS", 2)
    client = await join()
    accept = hub._accept
    monkeypatch.setattr(hub, "_accept", lambda *_: None)
    await client.publish(group_event(0))
    await client.publish(group_event(1))
    third = asyncio.create_task(client.publish(group_event(2)))
    await asyncio.sleep(2 * HEARTBEAT_S)
    assert not third.done()
    monkeypatch.setattr(hub, "_accept", accept)
    await asyncio.wait_for(third, 10)
    assert [event.group for event in await take(client, 3)] == [0, 1, 2]


async def test_close_waits_for_what_was_published(hub, join):
    client = await join()
    for group in range(50):
        await client.publish(group_event(group))
    await client.close(linger_s=10)
    await client.close()
    assert hub.head_seq == 50
    with pytest.raises(FailedPrecondition, match="closed"):
        await client.publish(group_event(51))


async def test_close_ends_the_reader_and_a_waiting_publisher(hub, join, monkeypatch):
    monkeypatch.setattr(client_module, "PENDING_EVENTS", 1)
    monkeypatch.setattr(hub, "_accept", lambda *_: None)
    client = await join()
    reader = asyncio.create_task(take(client, 1))
    await client.publish(group_event(0))
    publisher = asyncio.create_task(client.publish(group_event(1)))
    await asyncio.sleep(0)
    await client.close(linger_s=0)
    assert await asyncio.wait_for(reader, 10) == []
    with pytest.raises(FailedPrecondition):
        await asyncio.wait_for(publisher, 10)


async def test_without_a_hub_start_says_where_it_looked(address):
    client = BusClient(address, LEARNER, Incarnation("a"), heartbeat_s=HEARTBEAT_S)
    with pytest.raises(Unavailable, match=r"hub\.sock"):
        await client.start(timeout_s=0.2)


async def test_local_subscription_replays_then_follows_and_ends_with_the_hub(address):
    hub = Hub(address)
    await hub.start()
    for event in (step_began(1), group_event(0), step_began(2)):
        hub.publish(event)
    everything, running = [], []

    async def follow(into, after_seq):
        async for event in hub.subscribe(after_seq):
            into.append(event.seq)

    followers = [
        asyncio.create_task(follow(everything, 0)),
        asyncio.create_task(follow(running, None)),
    ]
    await asyncio.sleep(0)
    hub.publish(group_event(1, epoch=2))
    await asyncio.sleep(0)
    await hub.close()
    await asyncio.wait_for(asyncio.gather(*followers), 10)
    assert (everything, running) == ([1, 2, 3, 4], [3, 4])


async def test_local_subscription_to_what_is_gone_is_a_gap(address):
    hub = Hub(address, kept_limit=1)
    hub.publish(group_event(0))
    hub.publish(group_event(1))
    with pytest.raises(SequenceGap):
        await anext(hub.subscribe(0))


async def test_garbage_from_a_peer_does_not_stop_the_hub(hub, join, address):
    context = zmq.asyncio.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(address)
    for frames in ([b"\xff\xff\xff"], [b""], [b"", b"", b""]):
        await peer.send_multipart(frames)
        reply = events_pb2.HubReply.FromString((await peer.recv_multipart())[-1])
        assert reply.WhichOneof("body") == "error"
    context.destroy(linger=0)
    client = await join()
    hub.publish(group_event(0))
    assert seqs(await take(client, 1)) == [1]
