"""How much a CUDA context takes: measured where it can be, else taken for granted."""

from __future__ import annotations

import fcntl

import pytest

from common.gpu import context
from common.gpu.context import CONTEXT_BYTES, measured, open_context

MIB = 1 << 20


class Device:
    """A device's memory in use."""

    def __init__(self, grows_bytes: int) -> None:
        self.used_bytes = 5000 * MIB
        self._grows_bytes = grows_bytes

    def create(self) -> None:
        self.used_bytes += self._grows_bytes

    def used(self) -> int:
        return self.used_bytes


@pytest.mark.parametrize(
    ("grows_mib", "size_bytes"),
    [(430, 430 * MIB), (0, CONTEXT_BYTES), (-800, CONTEXT_BYTES), (9000, CONTEXT_BYTES)],
)
def test_only_what_is_plausible_counts(grows_mib, size_bytes):
    device = Device(grows_mib * MIB)
    assert measured(device.create, device.used) == size_bytes


def test_it_is_created_where_nothing_can_be_measured():
    created = []
    assert measured(lambda: created.append(1), None) == CONTEXT_BYTES
    assert created == [1]


def test_one_process_at_a_time(monkeypatch, tmp_path):
    lock = tmp_path / "state" / "context.lock"
    device = Device(300 * MIB)

    def create(ordinal: int) -> None:
        with lock.open("a") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        device.create()

    monkeypatch.setattr(context, "use_primary_context", create)
    monkeypatch.setattr(context, "_device_used", lambda ordinal: device.used)
    assert open_context(0, lock=lock) == 300 * MIB
    with lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
