"""A bus client in a process of its own: `… client_process ADDRESS PARTICIPANT COUNT`.

Publishes COUNT events, prints `seq event_id` for each event it sees.
"""

from __future__ import annotations

import asyncio
import sys

from common.bus import BusClient
from common.ids import Incarnation, Participant
from tests.unit.bus.events import group_event


async def main(address, name, count):
    participant = Participant.parse(name)
    client = BusClient(address, participant, Incarnation("a"), heartbeat_s=0.1)
    await client.start(timeout_s=20)
    for group in range(count):
        await client.publish(group_event(group, sender=participant))
    async for event in client.events():
        sys.stdout.write(f"{event.seq} {event.event_id}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
