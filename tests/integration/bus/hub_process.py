"""A hub in a process of its own: `python -m tests.integration.bus.hub_process ADDRESS`.

Prints its incarnation, then one line for each event: `seq event_id`.
"""

from __future__ import annotations

import asyncio
import sys

from common.bus import Hub


async def main(address):
    hub = Hub(address)
    await hub.start()
    sys.stdout.write(f"{hub.incarnation}\n")
    sys.stdout.flush()
    async for event in hub.subscribe(0):
        sys.stdout.write(f"{event.seq} {event.event_id}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
