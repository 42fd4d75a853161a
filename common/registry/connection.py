"""Redis connections, and what happens while Redis is away: try again, for as long as told."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit, urlunsplit

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from common.errors import FailedPrecondition, RollplexError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

Result = TypeVar("Result")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
ANSWER_S = 5.0
"""Redis that has not answered by then is away."""
_LOG_EVERY_S = 10.0

_AWAY = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    OSError,
)


class RedisRefused(FailedPrecondition):
    """Redis answered, and the answer was no: wrong password, full disk, wrong kind of value."""


class RedisBroken(RollplexError):
    """Redis holds something that this version cannot read."""


def open_redis(url: str) -> Redis:
    """A client with text replies. It connects at the first command; `await client.aclose()`."""
    # Repeats are `retry_redis`'s: it knows which commands may be repeated. Its timeout is, too: the
    # client's own is `asyncio.wait_for`, which before Python 3.12 can swallow a cancellation.
    client: Redis = Redis.from_url(
        url, decode_responses=True, retry=Retry(NoBackoff(), 0), socket_timeout=None
    )
    return client


def redacted(url: str) -> str:
    """The address without its password, for messages."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


async def retry_redis(
    operation: Callable[[], Awaitable[Result]],
    *,
    what: str,
    url: str,
    deadline_s: float | None = None,
) -> Result:
    """Run `operation` again and again while Redis is away.

    A connection may break between the effect and the reply, so `operation` has to be one that may
    run twice.

    Args:
        operation: one command or script.
        what: what it is for, in words.
        url: named in messages, its password left out.
        deadline_s: give up after this; None: never.

    Raises:
        Unavailable: Redis was away for `deadline_s`.
        RedisRefused: Redis answered with an error.
    """
    began_s = time.monotonic()
    logged_s = -_LOG_EVERY_S
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            async with asyncio.timeout(ANSWER_S):
                result = await operation()
        except exceptions.AuthenticationError as error:
            raise RedisRefused(
                f"{what}: Redis at {redacted(url)} refused the login: {error}"
            ) from (error)
        except _AWAY as error:
            waited_s = time.monotonic() - began_s
            if deadline_s is not None and waited_s + pause_s > deadline_s:
                raise Unavailable(
                    f"{what}: Redis at {redacted(url)} could not be reached for {waited_s:.1f} s "
                    f"({error}). Is the server running, and is redis.url of the deployment right? "
                    f"`python -m deploy.local status` and `... logs redis` show the node's own."
                ) from error
            if waited_s - logged_s >= _LOG_EVERY_S:
                logged_s = waited_s
                log.warning("Redis is away", extra={"wanted": what, "cause": str(error)})
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        except exceptions.RedisError as error:
            raise RedisRefused(f"{what}: Redis at {redacted(url)} answered: {error}") from error
        else:
            if logged_s >= 0:
                log.info("Redis is back", extra={"away_s": round(time.monotonic() - began_s, 1)})
            return result
