"""A process's CUDA context, and what it takes of the device's memory."""

from __future__ import annotations

import fcntl
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from common.gpu.driver import device_uuid, use_primary_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

log = logging.getLogger(__name__)

_MIB = 1 << 20
CONTEXT_BYTES = 512 * _MIB
"""Taken for granted where it cannot be measured."""
_PLAUSIBLE_BYTES = range(32 * _MIB, 2048 * _MIB)
"""Anything else is the doing of another process."""


def open_context(ordinal: int, *, lock: Path) -> int:
    """Create the GPU's primary context, which torch uses too, and measure it.

    The management library tells what all processes use before and after. Only one of the node's
    processes does this at a time.

    Args:
        ordinal: in this process's numbering.
        lock: file that the node's processes share; made if need be.

    Returns: bytes; `CONTEXT_BYTES` where it cannot be measured, or something else changed
        meanwhile.
    """
    used = _device_used(ordinal)
    with _alone(lock):
        size_bytes = measured(lambda: use_primary_context(ordinal), used)
    log.info("CUDA context opened", extra={"ordinal": ordinal, "size_bytes": size_bytes})
    return size_bytes


def measured(create: Callable[[], None], used: Callable[[], int] | None) -> int:
    """By how much `create` raises what is in use, in bytes.

    Args:
        used: None: it cannot be told.

    Returns: `CONTEXT_BYTES` where it cannot be told, or is not plausible.
    """
    before_bytes = used() if used is not None else 0
    create()
    size_bytes = used() - before_bytes if used is not None else 0
    return size_bytes if size_bytes in _PLAUSIBLE_BYTES else CONTEXT_BYTES


def _device_used(ordinal: int) -> Callable[[], int] | None:
    """Bytes in use on a GPU by all processes; None: the management library does not tell."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle: Any = pynvml.nvmlDeviceGetHandleByUUID(device_uuid(ordinal))
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        log.info("CUDA contexts are not measured", extra={"cause": str(error)})
        return None
    return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
