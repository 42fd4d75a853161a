"""Streams whose kernels fill no more than a share of the GPU's SMs.

Made once at start, one stream a share; switching from one share to another is choosing another
stream. The shares of one process overlap, and so do those of different processes: the driver hands
out SMs from the first one on. Whoever runs beside others has to run alone among those with shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from common.errors import InvalidArgument
from common.gpu.driver import bindings, call, use_primary_context

if TYPE_CHECKING:
    from collections.abc import Sequence


class GreenStreams:
    """One torch stream for each share, and the device's own for the whole GPU."""

    def __init__(self, ordinal: int, shares: Sequence[int]) -> None:
        """Create the streams.

        Args:
            shares: numbers of SMs; the driver rounds each up to its own granularity.
        Raises: InvalidArgument for a share that is not between 1 and the device's SMs;
            CudaDriverError where the driver has no green contexts.
        """
        use_primary_context(ordinal)
        self.total_sms = torch.cuda.get_device_properties(ordinal).multi_processor_count
        self._contexts: list[Any] = []
        self._streams: dict[int, torch.cuda.Stream] = {
            self.total_sms: torch.cuda.Stream(device=ordinal)
        }
        for share in shares:
            if not 1 <= share <= self.total_sms:
                raise InvalidArgument(
                    f"SM share {share}: legal is 1 to {self.total_sms}", share=share
                )
            if share < self.total_sms:
                sms, stream = self._create(ordinal, share)
                self._streams[sms] = stream

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares there are, in SMs, smallest first; the last one is the whole GPU."""
        return tuple(sorted(self._streams))

    def stream(self, share: int) -> torch.cuda.Stream:
        """The stream of the smallest share that has at least so many SMs."""
        fitting = [sms for sms in self._streams if sms >= share]
        return self._streams[min(fitting, default=self.total_sms)]

    def _create(self, ordinal: int, share: int) -> tuple[int, torch.cuda.Stream]:
        driver = bindings()
        device = call("cuDeviceGet", ordinal)
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = call("cuDeviceGetDevResource", device, kind)
        groups, _, _ = call("cuDevSmResourceSplitByCount", 1, whole, 0, share)
        description = call("cuDevResourceGenerateDesc", [groups[0]], 1)
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = call("cuGreenCtxCreate", description, device, flags)
        self._contexts.append(context)
        nonblocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        raw = call("cuGreenCtxStreamCreate", context, nonblocking, 0)
        stream = torch.cuda.ExternalStream(int(raw), device=torch.device("cuda", ordinal))
        return int(groups[0].sm.smCount), stream
