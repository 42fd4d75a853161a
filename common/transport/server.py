"""Server side of gRPC: interceptor, health, reflection, and the address that it really has."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import FailedPrecondition, RollplexError
from common.transport.errors import ERROR_METADATA_KEY, METADATA_LIMIT_BYTES, STATUS, detail_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from common.ids import Participant

log = logging.getLogger(__name__)

_DETAILS_LIMIT = 512

_OPTIONS: tuple[tuple[str, int], ...] = (
    # Without this a second server on a port that is taken would share it instead of failing.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_metadata_size", METADATA_LIMIT_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_LIMIT_BYTES),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundServicer:
    """A servicer and how it joins a server.

    Attributes:
        name: full service name, such as `rollplex.v1.Control`; also its name in health checks.
        servicer: the implementation, its methods coroutines or async generators.
        add: the generated `add_…Servicer_to_server`.
    """

    name: str
    servicer: Any
    add: Callable[[Any, Any], None]


class Health:
    """grpc.health.v1 of one server: one name per service, the empty name overall."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = ("", *names)
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]

    @property
    def servicer(self) -> Any:
        """For `add_HealthServicer_to_server`."""
        return self._servicer

    async def set_serving(self, serving: bool) -> None:
        """Report SERVING or NOT_SERVING under every name; no effect once draining."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in self._names:
            await self._servicer.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def drain(self) -> None:
        """NOT_SERVING from now on, whatever is set later."""
        await self._servicer.enter_graceful_shutdown()


class GrpcServer:
    """A started server.

    Attributes:
        address: `host:port` with the real port.
        health: its health service; NOT_SERVING until told otherwise.
    """

    def __init__(self, server: grpc.aio.Server, address: str, health_: Health) -> None:
        self._server = server
        self.address = address
        self.health = health_

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; cut off those that still run after `grace_s`. Idempotent."""
        await self._server.stop(grace_s)


async def serve(
    servicers: Sequence[BoundServicer], address: str, participant: Participant
) -> GrpcServer:
    """Start a server with health and reflection, NOT_SERVING at first.

    Args:
        servicers: what it serves.
        address: `host:port`; port 0: the system picks, `GrpcServer.address` tells.
        participant: named in errors that cross the border.

    Raises:
        FailedPrecondition: the address cannot be listened on.
    """
    server = grpc.aio.server(interceptors=(ErrorInterceptor(participant),), options=_OPTIONS)
    names = [bound.name for bound in servicers]
    for bound in servicers:
        bound.add(bound.servicer, server)
    health_ = Health(names)
    await health_.set_serving(False)
    health_pb2_grpc.add_HealthServicer_to_server(health_.servicer, server)
    reflection.enable_server_reflection(
        (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    host, _, _ = address.rpartition(":")
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise FailedPrecondition(
            f"{participant} cannot listen for gRPC on {address}: is another process using the "
            f"port? Free it, or choose another grpc_port ({error})"
        ) from error
    await server.start()
    return GrpcServer(server, f"{host}:{port}", health_)


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Turns what a servicer raises into a status with an `ErrorDetail` in the trailing metadata."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Called by gRPC for each call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        if handler.response_streaming:
            inner = handler.stream_stream or handler.unary_stream
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            wrap = self._wrap_stream if inspect.isasyncgenfunction(inner) else self._wrap_unary
        else:
            inner = handler.stream_unary or handler.unary_unary
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            wrap = self._wrap_unary
        return make(
            wrap(method, inner),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _wrap_unary(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        async def behaviour(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await inner(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - translated for the caller
                return await self._abort(method, context, error)

        return behaviour

    def _wrap_stream(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        async def behaviour(
            request: Any, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            try:
                async for reply in inner(request, context):
                    yield reply
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - translated for the caller
                await self._abort(method, context, error)

        return behaviour

    async def _abort(
        self, method: str, context: grpc.aio.ServicerContext[Any, Any], error: Exception
    ) -> None:
        detail = detail_of(error, self._participant)
        if isinstance(error, RollplexError):
            status = STATUS[error.code]
            log.info("call refused", extra={"method": method, "status": status.name})
        else:
            status = grpc.StatusCode.INTERNAL
            log.error("call failed", exc_info=error, extra={"method": method})
        await context.abort(
            status,
            f"{detail.type}: {detail.message}"[:_DETAILS_LIMIT],
            trailing_metadata=((ERROR_METADATA_KEY, detail.SerializeToString()),),
        )
