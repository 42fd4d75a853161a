"""The shares of a device's SMs that jobs of this process may be run on."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import torch

from common.gpu.driver import CudaDriverError
from common.gpu.green_streams import GreenStreams
from common.worker.device import wait_for
from common.worker.device_memory import device_memory

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

log = logging.getLogger(__name__)

KEPT_BYTES = 2 << 30
"""Memory that may lie unused in this process, when jobs go on to another share, in any case."""
SCARCE_BYTES = 10 << 30
"""With less of the device free, more may not."""


class SmShares:
    """Of one device."""

    def __init__(self, device: torch.device, wanted: tuple[int, ...]) -> None:
        """Args: wanted: SMs of each share, up to the whole device; the driver rounds up."""
        self.total_sms = device_sms(device)
        self.device_name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        )
        self._device = device
        self._last = self.total_sms
        self._streams = _green_streams(device, wanted)
        made = set() if self._streams is None else {*self._streams.shares} - {self.total_sms}
        if not made or self.total_sms in wanted:
            made.add(self.total_sms)
        self.shares = tuple(sorted(made))
        """The shares there are, smallest first: the whole device only where it was wanted, or
        where there is nothing else."""

    def run(self, share: int, job: Callable[[], T]) -> T:
        """Run a job to the end of its kernels on one of `shares`, or on the whole device."""
        self._move_to(share)
        if self._streams is None or share >= self.total_sms:
            value = job()
            wait_for(self._device)
            return value
        stream = self._streams.stream(share)
        with torch.cuda.stream(stream):
            value = job()
            stream.synchronize()
        return value

    def _move_to(self, share: int) -> None:
        """Memory that a stream has used is kept for that stream: no other share could have it.

        It is given back only where memory is scarce: the next job on that share takes it anew.
        """
        moves, self._last = share != self._last, share
        if not moves or self._streams is None:
            return
        memory = device_memory(self._device)
        if memory is not None and memory.unused > KEPT_BYTES and memory.free < SCARCE_BYTES:
            torch.cuda.empty_cache()


@functools.cache
def sm_shares(device: torch.device, wanted: tuple[int, ...]) -> SmShares:
    """Made once a process, in the compute thread."""
    shares = SmShares(device, wanted)
    log.info("SM shares", extra={"shares": shares.shares, "of": shares.total_sms})
    return shares


def device_sms(device: torch.device) -> int:
    """SMs of a GPU; a CPU counts as one, which cannot be shared out."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _green_streams(device: torch.device, wanted: tuple[int, ...]) -> GreenStreams | None:
    if device.type != "cuda":
        return None
    try:
        return GreenStreams(device.index, wanted)
    except CudaDriverError as error:
        log.warning(
            "no SM shares on this GPU: background work starves the decode",
            extra={"cause": str(error)},
        )
        return None
