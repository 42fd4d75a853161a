"""What a node's processes and its broker hold between two steps, and what of it has grown."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.integration.runs.node import BrokerStub, Node

MIB = 1 << 20
SHM = Path("/dev/shm")

RESIDENT, DESCRIPTORS, THREADS, MAPPINGS = (
    "resident bytes",
    "descriptors",
    "threads",
    "mappings of broker memory",
)
SHM_ENTRIES, SHM_BYTES = "entries of /dev/shm", "bytes in /dev/shm"
LEASES, LEASE_BYTES = "leases", "bytes of leases"

ALLOWED = {
    # Heaps that fragment, and tiny weights that are mapped at one look and spilled at the other.
    RESIDENT: 4 * MIB,
    # The same weights; a pool's last thread.
    DESCRIPTORS: 4,
    THREADS: 4,
    MAPPINGS: 4,
    SHM_ENTRIES: 0,
    SHM_BYTES: 0,
    LEASES: 0,
    LEASE_BYTES: 0,
}
"""Growth that is none."""

Footprint = dict[tuple[str, str], int]
"""By who holds it and what it is."""


async def footprint(node: Node, stub: BrokerStub) -> Footprint:
    """Of every program of the node, its children counted with it; of the broker's ledger; and of
    this user's files in /dev/shm.
    """
    found: Footprint = {}
    for participant in node.deployment.participants:
        name = str(participant)
        for what, size in _of_process(node.pid(name)).items():
            found[name, what] = size
    leases = [entry for entry in await node.entries(stub) if entry.HasField("lease_id")]
    found["ledger", LEASES] = len(leases)
    found["ledger", LEASE_BYTES] = sum(entry.bytes for entry in leases)
    sizes = _shm_sizes()
    found["node", SHM_ENTRIES] = len(sizes)
    found["node", SHM_BYTES] = sum(sizes)
    return found


def grown(
    before: Mapping[tuple[str, str], int],
    after: Mapping[tuple[str, str], int],
    allowed: Mapping[str, int],
) -> list[str]:
    """What has grown by more than is allowed, a sentence each."""
    assert before.keys() == after.keys()
    return [
        f"{who}: {what} grew by {after[who, what] - size}, from {size} to {after[who, what]}; "
        f"{allowed[what]} are allowed"
        for (who, what), size in before.items()
        if after[who, what] - size > allowed[what]
    ]


def _of_process(pid: int) -> dict[str, int]:
    found = dict.fromkeys((RESIDENT, DESCRIPTORS, THREADS, MAPPINGS), 0)
    top = psutil.Process(pid)
    for process in (top, *top.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            found[RESIDENT] += process.memory_info().rss
            found[DESCRIPTORS] += process.num_fds()
            found[THREADS] += process.num_threads()
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            found[MAPPINGS] += sum("/memfd:rollplex" in line for line in maps.splitlines())
    return found


def _shm_sizes() -> list[int]:
    sizes = []
    for entry in os.scandir(SHM):
        with suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            if status.st_uid == os.getuid():
                sizes.append(status.st_size)
    return sizes
