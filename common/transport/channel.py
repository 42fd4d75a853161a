"""Client side of gRPC: channels on which every call has a deadline and errors have a type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from common.transport.errors import METADATA_LIMIT_BYTES, error_from_rpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

DEFAULT_DEADLINE_S = 30.0

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted peer is back within a second or so: look for it that often.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_metadata_size", METADATA_LIMIT_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_LIMIT_BYTES),
)


class Channel:
    """A gRPC channel for generated stubs: `ControlStub(channel)`.

    Unary calls return the reply; calls with a streamed reply return an async iterator. Both take
    `timeout` in seconds; a unary call without it gets the channel's deadline, a stream none. Failed
    calls raise `RollplexError`s only: the peer's own error by its code (a `RemoteError` too),
    `Unavailable` when the peer is away, `DeadlineExceeded` when it does not answer.
    """

    def __init__(self, address: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self.address = address
        self._deadline_s = deadline_s
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)

    async def close(self) -> None:
        """Cut running calls off and free the connection. Idempotent."""
        await self._channel.close(None)

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def unary_unary(self, method: str, *codec: Any, **kwargs: Any) -> Callable[..., Any]:
        """Called by generated stubs."""
        return self._unary(method, self._channel.unary_unary(method, *codec, **kwargs))

    def stream_unary(self, method: str, *codec: Any, **kwargs: Any) -> Callable[..., Any]:
        """Called by generated stubs."""
        return self._unary(method, self._channel.stream_unary(method, *codec, **kwargs))

    def unary_stream(self, method: str, *codec: Any, **kwargs: Any) -> Callable[..., Any]:
        """Called by generated stubs."""
        return self._stream(method, self._channel.unary_stream(method, *codec, **kwargs))

    def stream_stream(self, method: str, *codec: Any, **kwargs: Any) -> Callable[..., Any]:
        """Called by generated stubs."""
        return self._stream(method, self._channel.stream_stream(method, *codec, **kwargs))

    def _unary(self, method: str, multicallable: Any) -> Callable[..., Any]:
        async def call(request: Any, *, timeout: float | None = None, **kwargs: Any) -> Any:  # noqa: ASYNC109 - gRPC's own name
            deadline_s = self._deadline_s if timeout is None else timeout
            try:
                return await multicallable(request, timeout=deadline_s, **kwargs)
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error, address=self.address, method=method) from error

        return call

    def _stream(self, method: str, multicallable: Any) -> Callable[..., Any]:
        async def call(
            request: Any,
            *,
            timeout: float | None = None,  # noqa: ASYNC109 - gRPC's own name
            **kwargs: Any,
        ) -> AsyncIterator[Any]:
            replies = multicallable(request, timeout=timeout, **kwargs)
            try:
                async for reply in replies:
                    yield reply
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error, address=self.address, method=method) from error
            finally:
                replies.cancel()

        return call


def open_channel(address: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Any:
    """A `Channel`, typed so that generated stubs take it. Connects at the first call."""
    return Channel(address, deadline_s=deadline_s)
