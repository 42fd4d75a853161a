"""What of the GPU arenas needs no GPU: budgets, and the parts of a slab."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config.deployment import Deployment
from common.errors import FailedPrecondition
from services.broker.arena_cuda import RESERVE_BYTES, UNLISTED_BYTES, budget_bytes, limit_bytes
from services.broker.arena_ipc import Extents

GIB = 2**30


def test_default_budget_is_the_device_less_a_reserve() -> None:
    assert budget_bytes(None, total_bytes=140 * GIB, device="GPU-1") == 140 * GIB - RESERVE_BYTES
    assert budget_bytes(None, total_bytes=16 * GIB, device="GPU-1") == 12 * GIB


def test_budget_as_wanted() -> None:
    assert budget_bytes(1.5, total_bytes=16 * GIB, device="GPU-1") == 3 * GIB // 2


def test_budget_beyond_the_device_is_refused_by_name() -> None:
    with pytest.raises(FailedPrecondition) as caught:
        budget_bytes(80, total_bytes=64 * GIB, device="GPU-1")
    assert str(caught.value).startswith("hbm_budget_gib = 80, but GPU-1 has 64.0 GiB in all")
    assert "all but 8 GiB" in str(caught.value)


def test_a_budget_that_is_named_binds_what_processes_hold_too() -> None:
    assert limit_bytes(80, total_bytes=140 * GIB) == 80 * GIB
    assert limit_bytes(None, total_bytes=140 * GIB) == 140 * GIB - UNLISTED_BYTES
    assert limit_bytes(140, total_bytes=140 * GIB) == 140 * GIB - UNLISTED_BYTES


def test_a_node_has_the_memory_of_the_gpus_that_its_ranks_use() -> None:
    assert Deployment(train_tp=2, rollout_tp=2).gpus == 0
    assert Deployment(device="cuda").gpus == 1


SIZE = 16


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(0, 100))))
def test_parts_never_overlap_and_nothing_is_lost(story: list[tuple[bool, int, int]]) -> None:
    extents = Extents(SIZE)
    taken: dict[int, int] = {}
    for take, size, pick in story:
        if take:
            try:
                offset = extents.take(size)
            except OSError:
                assert all(free < size for _, free in extents)
                continue
            taken[offset] = size
        elif taken:
            offset = sorted(taken)[pick % len(taken)]
            extents.put(offset, taken.pop(offset))
        cells = [0] * SIZE
        for offset, length in [*taken.items(), *extents]:
            for cell in range(offset, offset + length):
                cells[cell] += 1
        assert cells == [1] * SIZE
        free = list(extents)
        assert all(a + length < b for (a, length), (b, _) in pairwise(free))


def test_a_full_slab_says_how_it_is_cut_up() -> None:
    extents = Extents(6)
    offsets = [extents.take(2) for _ in range(3)]
    extents.put(offsets[0], 2)
    extents.put(offsets[2], 2)
    with pytest.raises(OSError, match="4 bytes free, in 2 parts of which the largest is 2"):
        extents.take(3)
