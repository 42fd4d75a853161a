"""The answers of asks: futures that may be done already, as when whoever asked has left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable


def settle(answer: asyncio.Future[Any], value: Any) -> None:
    """Answer with a value."""
    if not answer.done():
        answer.set_result(value)


async def settle_with(answer: asyncio.Future[Any], work: Awaitable[Any]) -> None:
    """Answer with what the work returns or raises."""
    try:
        settle(answer, await work)
    except Exception as error:  # noqa: BLE001 - goes to the asker, typed
        refuse(answer, error)


def refuse(answer: asyncio.Future[Any], error: Exception) -> None:
    """Answer with an error."""
    if not answer.done():
        answer.set_exception(error)
