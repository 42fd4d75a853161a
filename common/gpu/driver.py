"""Calls of the CUDA driver with their errors as exceptions."""

from __future__ import annotations

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
    raw = bytes(call("cuDeviceGetUuid_v2", call("cuDeviceGet", ordinal)).bytes)
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
    call("cuInit", 0)
    device = call("cuDeviceGet", ordinal)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))
