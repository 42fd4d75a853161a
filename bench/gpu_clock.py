"""At what clock and power a GPU ran while something was measured, by its driver."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    import torch

EVERY_S = 0.01


class GpuClock:
    """Samples a GPU while the context lasts; on a CPU it does nothing.

    Args:
        device: a GPU is told by its UUID, so what this process sees does not matter.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended = threading.Event()
        self._samples: list[tuple[float, float]] = []
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Begin."""
        if self._device.type == "cuda":
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def figures(self) -> dict[str, float]:
        """Means: `sm_mhz` and `watts`; none without samples."""
        if not self._samples:
            return {}
        clocks, watts = zip(*self._samples, strict=True)
        return {"sm_mhz": sum(clocks) / len(clocks), "watts": sum(watts) / len(watts)}

    def _sample(self) -> None:
        import pynvml

        from common.gpu.driver import device_uuid

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(device_uuid(self._device.index or 0))
        while not self._ended.wait(EVERY_S):
            clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
            # `nvmlDeviceGetPowerUsage` is the mean of a second
            (power,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])
            self._samples.append((float(clock), power.value.uiVal / 1e3))
