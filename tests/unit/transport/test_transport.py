from __future__ import annotations

import asyncio
import socket

import pytest
from google.protobuf import empty_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.errors import (
    DeadlineExceeded,
    ErrorCode,
    FailedPrecondition,
    RemoteError,
    ResourceExhausted,
    RollplexError,
    Stale,
    Unavailable,
)
from common.ids import Participant, Service
from common.transport import BoundServicer, open_channel, serve
from common.transport.errors import _REMOTE_TYPES, MESSAGE_LIMIT, STATUS
from protos.rollplex.v1 import control_pb2, control_pb2_grpc

LEARNER = Participant(service=Service.LEARNER)
NAME = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name


class Control(control_pb2_grpc.ControlServicer):
    """Answers what the test put into `outcome`."""

    outcome: object = None

    def __init__(self):
        self.stream_ended = asyncio.Event()

    async def GetRun(self, request, context):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome == "hang":
            await asyncio.sleep(30)
        return control_pb2.Run(run_id=request.run_id)

    async def WatchRun(self, request, context):
        try:
            for step in range(3):
                yield control_pb2.RunUpdate(run=control_pb2.Run(steps_done=step))
            if isinstance(self.outcome, Exception):
                raise self.outcome
            if self.outcome == "hang":
                await asyncio.sleep(30)
        finally:
            self.stream_ended.set()


@pytest.fixture
async def control():
    servicer = Control()
    bound = BoundServicer(
        name=NAME, servicer=servicer, add=control_pb2_grpc.add_ControlServicer_to_server
    )
    server = await serve([bound], "127.0.0.1:0", LEARNER)
    channel = open_channel(server.address, deadline_s=10)
    yield servicer, control_pb2_grpc.ControlStub(channel), server, channel
    await channel.close()
    await server.stop(0)


async def test_port_zero_reports_the_real_port_and_calls_arrive(control):
    _, stub, server, _ = control
    assert int(server.address.rpartition(":")[2]) > 0
    assert (await stub.GetRun(control_pb2.GetRunRequest(run_id="r1"))).run_id == "r1"


async def test_typed_error_keeps_class_text_and_origin(control):
    servicer, stub, *_ = control
    servicer.outcome = Stale("lease 7 ended with epoch 3")
    with pytest.raises(Stale, match=r"lease 7 ended with epoch 3") as caught:
        await stub.GetRun(control_pb2.GetRunRequest())
    error = caught.value
    assert isinstance(error, RemoteError)
    assert error.code is ErrorCode.STALE
    assert (error.remote_type, error.service) == ("Stale", "learner/0")
    assert error.text == "lease 7 ended with epoch 3"
    assert error.pid > 0


async def test_unknown_exception_arrives_as_internal_with_type_and_text(control):
    servicer, stub, *_ = control
    servicer.outcome = KeyError("weights")
    with pytest.raises(RemoteError, match=r"KeyError.*weights") as caught:
        await stub.GetRun(control_pb2.GetRunRequest())
    assert caught.value.remote_code is ErrorCode.INTERNAL
    assert caught.value.remote_type == "KeyError"


async def test_long_non_ascii_error_text_arrives_cut_and_not_lost(control):
    servicer, stub, *_ = control
    servicer.outcome = ResourceExhausted("ü" * 100_000)
    with pytest.raises(ResourceExhausted) as caught:
        await stub.GetRun(control_pb2.GetRunRequest())
    assert caught.value.text.startswith("ü" * MESSAGE_LIMIT)
    assert "100000 characters in all" in caught.value.text


async def test_stream_error_comes_after_the_replies_before_it(control):
    servicer, stub, *_ = control
    servicer.outcome = FailedPrecondition("run r1 was stopped")
    seen = []

    async def read():
        async for update in stub.WatchRun(control_pb2.WatchRunRequest()):
            seen.append(update.run.steps_done)  # noqa: PERF401 - kept when the stream breaks

    with pytest.raises(FailedPrecondition, match="run r1 was stopped"):
        await read()
    assert seen == [0, 1, 2]


async def test_leaving_a_stream_ends_it_at_the_server(control):
    servicer, stub, *_ = control
    servicer.outcome = "hang"
    stream = stub.WatchRun(control_pb2.WatchRunRequest())
    assert (await anext(stream)).run.steps_done == 0
    await stream.aclose()
    await asyncio.wait_for(servicer.stream_ended.wait(), 10)


async def test_call_without_answer_ends_at_its_deadline(control):
    servicer, stub, server, _ = control
    servicer.outcome = "hang"
    with pytest.raises(DeadlineExceeded, match=server.address):
        await stub.GetRun(control_pb2.GetRunRequest(), timeout=0.2)


async def test_absent_peer_is_unavailable_and_found_again_after_restart(control):
    servicer, stub, server, _ = control
    await stub.GetRun(control_pb2.GetRunRequest())
    await server.stop(0)
    with pytest.raises(Unavailable, match=server.address):
        await stub.GetRun(control_pb2.GetRunRequest())
    bound = BoundServicer(
        name=NAME, servicer=servicer, add=control_pb2_grpc.add_ControlServicer_to_server
    )
    again = await serve([bound], server.address, LEARNER)
    reply = await stub.GetRun(
        control_pb2.GetRunRequest(run_id="r2"), timeout=10, wait_for_ready=True
    )
    assert reply.run_id == "r2"
    await again.stop(0)


async def test_method_that_is_not_served_says_so(control):
    *_, channel = control
    call = channel.unary_unary(
        "/rollplex.v1.Control/NoSuch",
        request_serializer=empty_pb2.Empty.SerializeToString,
        response_deserializer=empty_pb2.Empty.FromString,
    )
    with pytest.raises(FailedPrecondition, match="does not serve"):
        await call(empty_pb2.Empty())


async def test_taken_port_is_refused_with_its_address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FailedPrecondition, match=address):
            await serve([], address, LEARNER)


async def test_two_servers_do_not_share_a_port(control):
    _, _, server, _ = control
    with pytest.raises(FailedPrecondition, match=server.address):
        await serve([], server.address, LEARNER)


async def test_health_has_a_name_for_each_service_and_drains_one_way(control):
    _, _, server, channel = control
    stub = health_pb2_grpc.HealthStub(channel)
    status = health_pb2.HealthCheckResponse.ServingStatus

    async def check(name):
        return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status

    assert [await check(""), await check(NAME)] == [status.NOT_SERVING] * 2
    await server.health.set_serving(True)
    assert [await check(""), await check(NAME)] == [status.SERVING] * 2
    await server.health.drain()
    await server.health.set_serving(True)
    assert [await check(""), await check(NAME)] == [status.NOT_SERVING] * 2


async def test_reflection_lists_the_services(control):
    *_, channel = control
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def ask():
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    replies = [reply async for reply in stub.ServerReflectionInfo(ask(), timeout=10)]
    names = {entry.name for entry in replies[0].list_services_response.service}
    assert {NAME, "grpc.health.v1.Health"} <= names


def test_every_code_has_its_own_status_and_class():
    assert set(STATUS) == set(_REMOTE_TYPES) == set(ErrorCode)
    assert len(set(STATUS.values())) == len(ErrorCode)
    for code, kind in _REMOTE_TYPES.items():
        assert kind.code is code
        assert issubclass(kind, RollplexError)
