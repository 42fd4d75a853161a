"""Device memory that leaves and comes back at its address, on a simulated driver."""

from __future__ import annotations

import gc
import os

import pytest

from common.gpu import driver, host_memory, legacy_ipc, shared_memory
from common.gpu.host_memory import PinnedMemory
from common.gpu.shared_memory import MappedMemory, OwnedMemory
from common.tensors import device
from common.tensors.device import map_handle, mapped_storage
from common.tensors.reaper import REAPER
from protos.rollplex.v1 import broker_pb2 as pb
from services.broker import arena_cuda
from services.broker.arena import SpillingArena
from services.broker.arena_cuda import MARGIN_BYTES, CudaArena
from services.broker.arena_ipc import IpcArena
from tests.unit.gpu.simulated import GRANULARITY_BYTES, SimulatedDriver

SIZE_BYTES = 3 * GRANULARITY_BYTES
TOTAL_BYTES = MARGIN_BYTES + 4 * SIZE_BYTES
PATTERN = bytes(range(256)) * (SIZE_BYTES // 256)


@pytest.fixture
def gpu(monkeypatch):
    gpu = SimulatedDriver(TOTAL_BYTES)
    gpu.install(monkeypatch, shared_memory, host_memory, legacy_ipc)
    monkeypatch.setattr(host_memory, "PART_BYTES", GRANULARITY_BYTES * 2)
    monkeypatch.setattr(host_memory, "SLICE_BYTES", GRANULARITY_BYTES // 2 + 4096)
    monkeypatch.setattr(REAPER, "start", lambda: None)
    for cached in (device._ordinal, driver._primary_context):
        cached.cache_clear()
    yield gpu
    for cached in (device._ordinal, driver._primary_context):
        cached.cache_clear()


def handle_of(arena, generation, *, life=0):
    return pb.TensorHandle(
        device=arena.device, size_bytes=SIZE_BYTES, generation=generation, name="weights", life=life
    )


def descriptor_of(allocation):
    return allocation.export(writable=True).fd


def spill(arena, allocation, copy):
    arena.write_out(allocation, copy)
    arena.free(allocation)


def test_which_arenas_spill(gpu):
    assert isinstance(CudaArena(0), SpillingArena)
    assert not isinstance(IpcArena(0, TOTAL_BYTES), SpillingArena)


def test_memory_leaves_the_device_and_comes_back_at_its_address(gpu):
    arena = CudaArena(0)
    allocation = arena.allocate(SIZE_BYTES, "weights", zeroed=True)
    copy = arena.new_copy(SIZE_BYTES)
    pages = map_handle(handle_of(arena, 1), descriptor_of(allocation))
    address = pages.address
    gpu.at(address, SIZE_BYTES)[:] = PATTERN
    told = []
    for life in (1, 2):
        assert pages.parking.park(lambda: told.append("parked"))
        spill(arena, allocation, copy)
        assert gpu.free_bytes == TOTAL_BYTES
        with pytest.raises(AssertionError, match="no memory at"):
            gpu.at(address, 1)
        allocation = arena.read_back(copy, "weights")
        # Opened again or held again: the same pages, with the memory of this life.
        assert map_handle(handle_of(arena, 1, life=life), descriptor_of(allocation)) is pages
        assert bytes(gpu.at(address, SIZE_BYTES)) == PATTERN
    assert told == ["parked", "parked"]
    copy.free()
    copy.free()
    assert not gpu.pinned


def test_a_copy_is_good_for_more_than_one_life(gpu):
    arena = CudaArena(0)
    allocation = arena.allocate(SIZE_BYTES, "weights", zeroed=True)
    copy = arena.new_copy(SIZE_BYTES)
    pages = map_handle(handle_of(arena, 5), descriptor_of(allocation))
    gpu.at(pages.address, SIZE_BYTES)[:] = PATTERN
    assert pages.parking.park(lambda: None)
    spill(arena, allocation, copy)
    arena.free(arena.read_back(copy, "weights"))
    assert gpu.free_bytes == TOTAL_BYTES
    allocation = arena.read_back(copy, "weights")
    descriptor = descriptor_of(allocation)
    pages.parking.bring_back(2, descriptor)
    os.close(descriptor)
    assert bytes(gpu.at(pages.address, SIZE_BYTES)) == PATTERN
    copy.free()


def test_memory_of_an_older_life_is_replaced(gpu):
    arena = CudaArena(0)
    first = arena.allocate(SIZE_BYTES, "weights", zeroed=True)
    pages = map_handle(handle_of(arena, 2), descriptor_of(first))
    other = arena.allocate(SIZE_BYTES, "weights", zeroed=True)
    arena.free(first)
    for descriptor, life in ((descriptor_of(other), 1), (descriptor_of(other), 1)):
        pages.parking.bring_back(life, descriptor)
        os.close(descriptor)
    assert gpu.free_bytes == TOTAL_BYTES - SIZE_BYTES
    arena.free(other)


def test_what_is_held_is_not_parked(gpu):
    arena = CudaArena(0)
    allocation = arena.allocate(SIZE_BYTES, "weights", zeroed=True)
    pages = map_handle(handle_of(arena, 3), descriptor_of(allocation))
    pages.parking.enter()
    assert not pages.parking.park(pytest.fail)
    assert gpu.at(pages.address, SIZE_BYTES)
    pages.parking.leave()
    assert pages.parking.park(lambda: None)


def test_parked_pages_give_their_address_back(gpu):
    arena = CudaArena(0)
    allocation = arena.allocate(SIZE_BYTES, "weights", zeroed=True)
    pages = map_handle(handle_of(arena, 4), descriptor_of(allocation))
    pages.parking.park(lambda: None)
    departure = pages.departure
    del pages
    gc.collect()
    assert mapped_storage(4) is None
    departure.finish()
    assert not gpu.reserved


def test_a_restore_leaves_a_margin(gpu):
    arena = CudaArena(0)
    allocation = arena.allocate(SIZE_BYTES, "weights", zeroed=True)
    copy = arena.new_copy(SIZE_BYTES)
    spill(arena, allocation, copy)
    others = OwnedMemory(0, 3 * SIZE_BYTES + GRANULARITY_BYTES)
    with pytest.raises(OSError, match="bytes are free for all processes"):
        arena.read_back(copy, "weights")
    others.release()
    arena.free(arena.read_back(copy, "weights"))
    copy.free()


def test_a_failed_import_keeps_no_address(gpu):
    with open(os.devnull) as nothing, pytest.raises(KeyError):
        MappedMemory(0, nothing.fileno(), SIZE_BYTES)
    assert not gpu.reserved


def test_pinned_memory_that_is_refused_is_an_error_of_the_system(gpu, monkeypatch):
    def refuse(*_):
        raise arena_cuda.CudaDriverError("no", status="CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(gpu, "cuMemHostAlloc", refuse, raising=False)
    with pytest.raises(OSError, match="bytes of pinned memory"):
        CudaArena(0).new_copy(SIZE_BYTES)


def test_pinned_memory_is_taken_in_parts(gpu):
    copy = PinnedMemory(0, SIZE_BYTES)
    assert sorted(map(len, gpu.pinned.values())) == [GRANULARITY_BYTES, 2 * GRANULARITY_BYTES]
    copy.free()
