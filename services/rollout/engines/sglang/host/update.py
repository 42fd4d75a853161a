"""Sessions in which SGLang takes weights, and its answers that are failures."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.managers import io_struct

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class UpdateRefused(Exception):
    """SGLang has answered an update with a failure, which it does not raise."""


@asynccontextmanager
async def updating(manager: Any) -> AsyncIterator[None]:
    """Weights may be written inside; SGLang 0.5.17 has no such sessions.

    Raises: UpdateRefused if SGLang does not begin or end one.
    """
    if not hasattr(manager, "begin_weight_update"):
        yield
        return
    require(await manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(), None))
    try:
        yield
    finally:
        ended = await manager.end_weight_update(io_struct.EndWeightUpdateReqInput(), None)
    require(ended)


def require(result: tuple[bool, str]) -> None:
    """Check an answer of SGLang. Raises UpdateRefused."""
    success, message = result
    if not success:
        raise UpdateRefused(message)
