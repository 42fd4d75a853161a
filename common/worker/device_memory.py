"""What a process can still take of its GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of a GPU, as one process sees them."""

    allocated: int
    """In tensors of this process."""
    reserved: int
    """Taken by this process from the device, those in tensors included."""
    free: int
    """Taken by no process, and within what this one's allocator may have."""

    @property
    def room(self) -> int:
        """What this process could still put into tensors."""
        return self.free + self.unused

    @property
    def unused(self) -> int:
        """What this process has taken and keeps for itself."""
        return self.reserved - self.allocated


def device_memory(device: torch.device) -> DeviceMemory | None:
    """What a GPU has now; None: the device is none."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    most = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return DeviceMemory(
        allocated=torch.cuda.memory_allocated(device),
        reserved=reserved,
        free=max(0, min(free, most - reserved)),
    )
