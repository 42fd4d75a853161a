"""Memory at an address that stays, and who may take it away."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.tensors.host import HostPages
from common.tensors.parking import Parking

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE_BYTES = 1 << 16
NAME = "rollplex:parking"


class Memory:
    """What was done to it, in order; `park` can be kept waiting."""

    def __init__(self) -> None:
        self.story: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.parking = threading.Event()

    def park(self) -> None:
        self.parking.set()
        assert self.gate.wait(20)
        self.story.append("park")

    def restore(self, descriptor: int) -> None:
        self.story.append(f"restore {descriptor}")


@pytest.fixture
def memfd() -> Iterator[int]:
    descriptor = os.memfd_create(NAME)
    os.ftruncate(descriptor, SIZE_BYTES)
    yield descriptor
    os.close(descriptor)


def lines() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line]


def test_parked_once_and_told_each_time() -> None:
    memory = Memory()
    parking = Parking(memory)
    for _ in range(2):
        assert parking.park(lambda: memory.story.append("told"))
    assert memory.story == ["park", "told", "told"]


def test_users_keep_it() -> None:
    memory = Memory()
    parking = Parking(memory)
    for _ in range(2):
        parking.enter()
    parking.leave()
    assert not parking.park(pytest.fail)
    parking.leave()
    assert parking.park(lambda: None)


def test_memory_comes_back_once_a_life() -> None:
    memory = Memory()
    parking = Parking(memory)
    parking.bring_back(0, 5)
    assert memory.story == []
    parking.park(lambda: None)
    parking.bring_back(1, 6)
    parking.bring_back(1, 7)
    assert memory.story == ["park", "park", "restore 6"]
    parking.bring_back(2, 8)
    assert memory.story[3:] == ["park", "restore 8"]
    assert (parking.life, parking.parked) == (2, False)


def test_what_comes_back_while_it_is_parked_comes_after() -> None:
    memory = Memory()
    parking = Parking(memory)
    memory.gate.clear()
    threads = [threading.Thread(target=lambda: parking.park(lambda: None))]
    threads[0].start()
    assert memory.parking.wait(20)
    # A hold is asked for and answered meanwhile; asking waits for nobody.
    parking.enter()
    threads.append(threading.Thread(target=lambda: parking.bring_back(0, 9)))
    threads[1].start()
    memory.gate.set()
    for thread in threads:
        thread.join(20)
    assert memory.story == ["park", "park", "restore 9"]
    assert not parking.parked


def test_host_pages_leave_and_come_back_under_their_views(memfd: int) -> None:
    os.pwrite(memfd, b"before", 0)
    pages = HostPages.of_fd(memfd, SIZE_BYTES, writable=True)
    values = np.frombuffer(memoryview(pages)[:6], dtype=np.uint8)
    address = values.ctypes.data
    assert bytes(values) == b"before"
    assert len(lines()) == 1
    assert pages.parking.park(lambda: None)
    assert lines() == []
    os.pwrite(memfd, b"later.", 0)
    pages.parking.bring_back(1, memfd)
    assert (values.ctypes.data, bytes(values)) == (address, b"later.")
    values[0] = ord("L")
    assert os.pread(memfd, 6, 0) == b"Later."
    del pages
    gc.collect()
    assert len(lines()) == 1
    del values
    gc.collect()
    assert lines() == []


def test_pages_of_a_reader_are_mapped_for_reading(memfd: int) -> None:
    descriptor = os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY)
    pages = HostPages.of_fd(descriptor, SIZE_BYTES, writable=False)
    os.close(descriptor)
    (line,) = lines()
    assert line.split()[1] == "r--s"
    assert len(pages) == SIZE_BYTES


def test_a_refused_mapping_is_an_error(memfd: int) -> None:
    descriptor = os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY)
    with pytest.raises(OSError, match=f"{SIZE_BYTES} bytes not mapped: Permission denied"):
        HostPages.of_fd(descriptor, SIZE_BYTES, writable=True)
    os.close(descriptor)
