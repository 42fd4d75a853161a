"""Calls of the CUDA driver with their errors as exceptions."""

from __future__ import annotations

import functools
from typing import Any

from common.errors import RollplexError, Unavailable


class CudaDriverError(RollplexError):
    """A call of the CUDA driver failed.

    Attributes (in `data`):
        call: name of the function.
        status: name of the driver's status.
    """


class CudaMissing(Unavailable):
    """There is no CUDA driver, or its Python bindings are not installed."""

    retryable = False


def bindings() -> Any:
    """The driver's Python bindings. Raises CudaMissing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaMissing(
            "the package cuda-bindings is not installed; install rollplex[cuda]"
        ) from error
    return driver


def out_of_memory(error: CudaDriverError) -> bool:
    """Whether the device had no room; any other failure means that more than this is broken."""
    return error.data["status"] == "CUDA_ERROR_OUT_OF_MEMORY"


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function by name.

    Returns: what it gives beside its status: nothing, one value, or a tuple.
    Raises: CudaDriverError for any status but success.
    """
    driver = bindings()
    status, *values = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CudaDriverError(f"{name} failed: {status.name}", call=name, status=str(status.name))
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def device_uuid(ordinal: int) -> str:
    """The GPU's identity in every process, as `nvidia-smi -L` prints it: `GPU-…`.

    Args:
        ordinal: in this process's numbering.
    """
    call("cuInit", 0)
    raw = bytes(call("cuDeviceGetUuid", call("cuDeviceGet", ordinal)).bytes)
    text = raw.hex()
    parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
    return f"GPU-{'-'.join(parts)}"


def ordinal_of(uuid: str) -> int:
    """The GPU's number in this process. Raises CudaMissing if it is not visible here."""
    call("cuInit", 0)
    count = int(call("cuDeviceGetCount"))
    for ordinal in range(count):
        if device_uuid(ordinal) == uuid:
            return ordinal
    raise CudaMissing(f"{uuid} is not among the {count} GPUs that this process sees", uuid=uuid)


def use_primary_context(ordinal: int) -> None:
    """Make the GPU's primary context, which torch uses too, current in this thread."""
    call("cuCtxSetCurrent", _primary_context(ordinal))


@functools.cache
def _primary_context(ordinal: int) -> Any:
    """Retained once and kept for the process's life."""
    call("cuInit", 0)
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal))


def memory_info(ordinal: int) -> tuple[int, int]:
    """Free and total bytes of the GPU, all processes counted."""
    use_primary_context(ordinal)
    free_bytes, total_bytes = call("cuMemGetInfo")
    return int(free_bytes), int(total_bytes)


def synchronize(ordinal: int) -> None:
    """Wait for everything that this process has asked of the GPU so far, on any stream.

    Blocks the thread, without the interpreter's lock. Not while a CUDA graph is captured.
    """
    use_primary_context(ordinal)
    call("cuCtxSynchronize")


def permit_during_capture() -> None:
    """Let this thread call the driver while another one captures a CUDA graph."""
    modes = bindings().CUstreamCaptureMode
    call("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED)


def fill_zero(ordinal: int, address: int, size_bytes: int) -> None:
    """Set device memory to zero; it is when this returns. Blocks, without the interpreter's lock.

    Args:
        address: of memory that is mapped in this process.
    """
    use_primary_context(ordinal)
    nonblocking = bindings().CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = call("cuStreamCreate", nonblocking)
    try:
        call("cuMemsetD8Async", address, 0, size_bytes, stream)
        call("cuStreamSynchronize", stream)
    finally:
        call("cuStreamDestroy", stream)
