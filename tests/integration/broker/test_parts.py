"""A whole that is larger than the arena, updated part by part, with a real broker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from common.ids import WeightsVersion
from common.tensors.parts import part_names
from common.tensors.spec import DType, Residency, TensorSpec
from common.tensors.storage import StorageSpec
from common.tensors.views import tensor_view
from tests.integration.broker.conftest import ARENA_BYTES, LEARNER, SETTLE_S, Broker
from tests.integration.broker.participant import RUN

if TYPE_CHECKING:
    import torch

    from common.tensors.storage import Storage

PARTS = 5
UPDATES = 3


def spec_of(size_bytes: int) -> StorageSpec:
    return StorageSpec(
        tensors=(TensorSpec(name="bytes", dtype=DType.UINT8, shape=(size_bytes,)),),
        readers=(),
        writers=(LEARNER,),
        residency=Residency.SPILLABLE,
    )


@pytest.mark.parametrize("fit", [1, 2, 3])
@pytest.mark.parametrize("expected", ["none", "next", "all", "last first"])
async def test_updates_end_with_room_for_few_parts(broker: Broker, fit: int, expected: str) -> None:
    client = broker.clients[0]
    spec = spec_of(ARENA_BYTES // fit - 4096)
    whole: list[tuple[Storage, torch.Tensor]] = []
    for name in part_names("whole", PARTS):
        storage = await client.open_storage(RUN, name, create=spec)
        whole.append((storage, tensor_view(storage, "bytes")))
        assert storage.park()

    async def update(version: int) -> None:
        early = {"all": whole, "last first": whole[::-1]}.get(expected, [])
        for storage, _ in early:
            storage.prefetch()
        for number, (storage, values) in enumerate(whole):
            with await storage.hold_write(WeightsVersion(version)) as hold:
                if expected == "next" and number + 1 < PARTS:
                    whole[number + 1][0].prefetch()
                assert values[:: 1 << 20].eq(version * (number + 1)).all()
                values.add_(number + 1)
                await hold.publish()
            assert storage.park()

    async with asyncio.timeout(SETTLE_S):
        for version in range(UPDATES):
            await update(version)
    for number, (storage, values) in enumerate(whole):
        assert storage.version == UPDATES - 1
        with await storage.hold_read(WeightsVersion(UPDATES - 1)):
            assert values.eq(UPDATES * (number + 1)).all()
        assert storage.park()
    ledger = await broker.ledger()
    assert max(arena.peak_bytes for arena in ledger.arenas if arena.device == "cpu") <= ARENA_BYTES
    for storage, _ in whole:
        storage.close()
