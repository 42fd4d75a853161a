from __future__ import annotations

import asyncio

import pytest

from common.actor import Mailbox, MailboxClosed, MailboxFull


async def test_messages_come_out_in_the_order_they_went_in():
    mailbox = Mailbox("m", 3)
    for number in range(3):
        mailbox.offer(number)
    assert len(mailbox) == 3
    assert [await mailbox.get() for _ in range(3)] == [0, 1, 2]


async def test_offer_to_a_full_mailbox_fails_and_names_it():
    mailbox = Mailbox("m", 1)
    mailbox.offer("kept")
    with pytest.raises(MailboxFull, match="mailbox m is full with 1 messages; str was not taken"):
        mailbox.offer("refused")
    assert await mailbox.get() == "kept"


async def test_put_waits_for_room():
    mailbox = Mailbox("m", 1)
    await mailbox.put(0)
    putting = asyncio.create_task(mailbox.put(1))
    await asyncio.sleep(0)
    assert not putting.done()
    assert [await mailbox.get(), await mailbox.get()] == [0, 1]
    await putting


async def test_get_waits_for_a_message():
    mailbox = Mailbox("m", 1)
    getting = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    mailbox.offer(7)
    assert await getting == 7


async def test_cancelled_put_leaves_nothing_behind():
    mailbox = Mailbox("m", 1)
    mailbox.offer(0)
    putting = asyncio.create_task(mailbox.put(1))
    await asyncio.sleep(0)
    putting.cancel()
    await asyncio.gather(putting, return_exceptions=True)
    assert await mailbox.get() == 0
    assert len(mailbox) == 0


async def test_close_keeps_what_was_taken_and_frees_everyone_who_waits():
    full, empty = Mailbox("full", 1), Mailbox("empty", 1)
    full.offer(0)
    waiting = [asyncio.create_task(full.put(1)), asyncio.create_task(empty.get())]
    await asyncio.sleep(0)
    for mailbox in (full, empty):
        mailbox.close()
        mailbox.close()
    for task in waiting:
        with pytest.raises(MailboxClosed):
            await task
    assert await full.get() == 0
    with pytest.raises(MailboxClosed, match="closed and empty"):
        await full.get()
    with pytest.raises(MailboxClosed, match="int was not taken"):
        full.offer(2)


async def test_many_writers_lose_and_repeat_nothing():
    mailbox = Mailbox("m", 2)

    async def write(first):
        for number in range(first, first + 50):
            await mailbox.put(number)

    writers = [asyncio.create_task(write(first)) for first in (0, 100, 200)]
    taken = [await mailbox.get() for _ in range(150)]
    await asyncio.gather(*writers)
    assert sorted(taken) == [*range(50), *range(100, 150), *range(200, 250)]
    for first in (0, 100, 200):
        mine = [number for number in taken if first <= number < first + 50]
        assert mine == sorted(mine)
