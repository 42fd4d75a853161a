"""A CUDA driver without a GPU: memory, mappings and copies as bytes of this process.

It objects to what a real one objects to, or would crash on: memory mapped twice at an address,
copies from addresses without memory, descriptors that nobody exported.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from types import SimpleNamespace
from typing import Any

from common.gpu import driver
from common.gpu.driver import CudaDriverError

GRANULARITY_BYTES = 1 << 21
UUID = bytes(range(16))


class SimulatedDriver:
    """Stands in for `common.gpu.driver.call` and `bindings`."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.memory: dict[int, bytearray] = {}
        """Physical memory by handle."""
        self.users: dict[int, int] = {}
        """Handles and mappings that keep it."""
        self.mapped: dict[int, int] = {}
        """Handle by address."""
        self.reserved: dict[int, int] = {}
        """Size by address."""
        self.pinned: dict[int, Any] = {}
        self._exports: dict[int, int] = {}
        self._numbers = itertools.count(1)

    def install(self, monkeypatch: Any, *modules: Any) -> None:
        """Let modules use it that took `call` and `bindings` by name."""
        for module in (driver, *modules):
            monkeypatch.setattr(module, "call", self.call, raising=False)
            monkeypatch.setattr(module, "bindings", _Anything, raising=False)

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - sum(map(len, self.memory.values()))

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self, name, self._nothing)(*arguments)

    def _nothing(self, *_: Any) -> int:
        return 0

    def cuDeviceGetUuid(self, _: Any) -> Any:
        return SimpleNamespace(bytes=UUID)

    def cuDeviceGetCount(self) -> int:
        return 1

    def cuIpcGetMemHandle(self, _: Any) -> Any:
        return SimpleNamespace(reserved=bytes(64))

    def cuMemGetInfo(self) -> tuple[int, int]:
        return self.free_bytes, self.total_bytes

    def cuMemGetAllocationGranularity(self, *_: Any) -> int:
        return GRANULARITY_BYTES

    def cuMemCreate(self, size_bytes: int, *_: Any) -> int:
        if size_bytes > self.free_bytes:
            raise CudaDriverError("no room", status="CUDA_ERROR_OUT_OF_MEMORY")
        handle = next(self._numbers)
        self.memory[handle], self.users[handle] = bytearray(size_bytes), 1
        return handle

    def cuMemRelease(self, handle: int) -> None:
        self.users[handle] -= 1
        if not self.users[handle]:
            del self.memory[handle]

    def cuMemExportToShareableHandle(self, handle: int, *_: Any) -> int:
        descriptor = os.memfd_create("export")
        self._exports[os.fstat(descriptor).st_ino] = handle
        return descriptor

    def cuMemImportFromShareableHandle(self, descriptor: int, *_: Any) -> int:
        handle = self._exports[os.fstat(descriptor).st_ino]
        self.users[handle] += 1
        return handle

    def cuMemAddressReserve(self, size_bytes: int, *_: Any) -> int:
        address = next(self._numbers) << 32
        self.reserved[address] = size_bytes
        return address

    def cuMemAddressFree(self, address: int, size_bytes: int) -> None:
        assert address not in self.mapped
        assert self.reserved.pop(address) == size_bytes

    def cuMemMap(self, address: int, size_bytes: int, offset: int, handle: int, _: int) -> None:
        assert address not in self.mapped
        assert self.reserved[address] == size_bytes == len(self.memory[handle])
        self.mapped[address] = handle
        self.users[handle] += 1

    def cuMemUnmap(self, address: int, size_bytes: int) -> None:
        self.cuMemRelease(self.mapped.pop(address))

    def cuMemsetD8Async(self, address: int, value: int, size_bytes: int, _: Any) -> None:
        self.at(address, size_bytes)[:] = bytes([value]) * size_bytes

    def cuMemHostAlloc(self, size_bytes: int, _: int) -> int:
        buffer = ctypes.create_string_buffer(size_bytes)
        self.pinned[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def cuMemFreeHost(self, pointer: int) -> None:
        del self.pinned[pointer]

    def _check_pinned(self, pointer: int, size_bytes: int) -> None:
        ends = ((base, base + len(part)) for base, part in self.pinned.items())
        assert any(low <= pointer and pointer + size_bytes <= high for low, high in ends)

    def cuMemcpyDtoHAsync(self, pointer: int, address: int, size_bytes: int, _: Any) -> None:
        self._check_pinned(pointer, size_bytes)
        ctypes.memmove(pointer, bytes(self.at(address, size_bytes)), size_bytes)

    def cuMemcpyHtoDAsync(self, address: int, pointer: int, size_bytes: int, _: Any) -> None:
        self._check_pinned(pointer, size_bytes)
        self.at(address, size_bytes)[:] = ctypes.string_at(pointer, size_bytes)

    def at(self, address: int, size_bytes: int) -> memoryview:
        """The bytes at an address; there has to be memory."""
        for base, handle in self.mapped.items():
            if base <= address and address + size_bytes <= base + len(self.memory[handle]):
                return memoryview(self.memory[handle])[address - base :][:size_bytes]
        raise AssertionError(f"no memory at {address:#x}")


class _Anything:
    """Every enumeration and every structure."""

    def __getattr__(self, name: str) -> _Anything:
        value = _Anything()
        setattr(self, name, value)
        return value

    def __call__(self) -> _Anything:
        return _Anything()
