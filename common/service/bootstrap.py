"""One service process, from its command line to its exit code.

Order at the end: health says NOT_SERVING; deregister; the service drains to the deadline; its run
is cancelled; it closes; gRPC, HTTP and Redis are closed. A second signal changes nothing. A service
that fails with ProcessUnusable ends the process as a kill would: nothing of this is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from common.config.base import ConfigError
from common.config.deployment import Deployment, load_deployment
from common.config.environment import set_allocator, set_threads
from common.errors import DeadlineExceeded, FailedPrecondition, ProcessUnusable, RollplexError
from common.service.context import Service, ServiceContext
from common.service.http import HttpServer
from common.service.lifecycle import Lifecycle
from common.service.logs import setup_logging
from common.transport import GrpcServer, serve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from common.ids import Participant
    from common.registry.client import ServiceEntry
    from common.service.arguments import ServiceArguments

log = logging.getLogger(__name__)

BEAT_S = 0.5
CONFIG_EXIT_CODE = 2
_DEREGISTER_S = 2.0
_CUT_OFF_AFTER_DRAIN_S = 5.0


def prepare_process(arguments: ServiceArguments) -> Deployment:
    """Read the deployment, set up the log, bound the threads; exits with 2 on a wrong value.

    Comes before any import of torch, which reads the variables once. Until `run_service` nothing is
    collected as garbage: of what imports make, all is kept.
    """
    gc.disable()
    try:
        deployment = _deployment_of(arguments)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(CONFIG_EXIT_CODE) from error
    setup_logging(arguments.participant, deployment.log_level)
    set_threads(deployment.threads(arguments.participant))
    if deployment.device == "cuda":
        set_allocator()
    return deployment


def run_service(
    participant: Participant,
    deployment: Deployment,
    build: Callable[[ServiceContext], Awaitable[Service]],
) -> int:
    """Build the service and serve it until SIGTERM or SIGINT.

    Args:
        participant: who this process is.
        deployment: the node.
        build: makes the service, within `deadlines.start_s`.

    Returns: the exit code: 0 after a signal, 1 after a failure.
    """
    # What was imported stays: no collection has to look at it, the one at the exit included.
    gc.freeze()
    gc.enable()
    process = _Process(ServiceContext(participant, deployment), build)
    try:
        asyncio.run(process.run())
    except Exception:
        log.exception("the service failed", extra={"pid": os.getpid()})
        return 1
    return 0


def _deployment_of(arguments: ServiceArguments) -> Deployment:
    deployment = load_deployment(arguments.config, arguments.sets)
    if arguments.participant not in deployment.participants:
        legal = ", ".join(str(participant) for participant in deployment.participants)
        raise ConfigError(
            f"--rank {arguments.participant.rank}: the deployment has no {arguments.participant}; "
            f"it has {legal}"
        )
    deployment.make_dirs()
    return deployment


class _Process:
    """The life of one process; see `common.service.lifecycle`."""

    def __init__(
        self, context: ServiceContext, build: Callable[[ServiceContext], Awaitable[Service]]
    ) -> None:
        self._context = context
        self._deadlines = context.deployment.deadlines
        self._build = build
        self._stop = asyncio.Event()
        self._entry: ServiceEntry | None = None

    async def run(self) -> None:
        """From CREATED to STOPPED, or FAILED and an exception."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        lifecycle = self._context.lifecycle
        lifecycle.move(Lifecycle.STARTING, "run_service")
        beats = asyncio.create_task(self._beat(), name="beat")
        try:
            await self._serve()
        except Exception as error:
            lifecycle.move(Lifecycle.FAILED, repr(error))
            raise
        else:
            lifecycle.move(Lifecycle.STOPPED, "closed")
            log.info("stopped")
        finally:
            beats.cancel()
            await self._context.registry.close()

    async def _serve(self) -> None:
        context, deployment = self._context, self._context.deployment
        async with contextlib.AsyncExitStack() as stack:
            http = HttpServer(
                deployment.http_address(context.participant), context.metrics, context.health
            )
            stack.callback(http.close)
            service = await self._built()
            if service is None:
                context.lifecycle.move(Lifecycle.DRAINING, "signal while starting")
                return
            stack.push_async_callback(service.close)
            server = await serve(
                service.servicers, deployment.grpc_address(context.participant), context.participant
            )
            stack.push_async_callback(server.stop, 0)
            self._entry = context.entry(grpc_address=server.address, http_address=http.address)
            await self._serve_until_stopped(service, server)

    async def _built(self) -> Service | None:
        """The service; None: a signal came first."""
        build = asyncio.ensure_future(self._build(self._context))
        stop = asyncio.create_task(self._stop.wait())
        done, pending = await asyncio.wait(
            {build, stop},
            timeout=self._deadlines.start_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if build in done:
            return build.result()
        if stop in done:
            return None
        raise DeadlineExceeded(
            f"{self._context.participant} was not built within deadlines.start_s = "
            f"{self._deadlines.start_s} s"
        )

    async def _serve_until_stopped(self, service: Service, server: GrpcServer) -> None:
        context = self._context
        work = asyncio.create_task(service.run(), name="service")
        registration = asyncio.create_task(self._keep_registered(), name="registration")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        tasks = (work, registration, stop)
        try:
            context.lifecycle.move(Lifecycle.SERVING, "built and listening")
            await server.health.set_serving(True)
            log.info("serving", extra={"grpc": server.address, "incarnation": context.incarnation})
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            failure = _failure_of(work) or _failure_of(registration)
            if _leaves_nothing_to_close(failure):
                _end_at_once(failure)
            registration.cancel()
            self._cut_off_late()
            if failure is None:
                context.lifecycle.move(Lifecycle.DRAINING, "signal")
            await server.health.drain()
            await self._deregister()
            if failure is not None:
                raise failure
            try:
                async with asyncio.timeout(self._deadlines.drain_s):
                    await service.drain()
            except TimeoutError:
                log.warning("drain deadline passed, running work is cut off")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_registered(self) -> None:
        assert self._entry is not None
        context = self._context
        entry = await context.registry.register(replace(self._entry, serving=True))
        while True:
            self._entry = entry = replace(entry, phase=context.phase)
            await context.registry.heartbeat(entry)
            await asyncio.sleep(self._deadlines.heartbeat_s)

    async def _deregister(self) -> None:
        assert self._entry is not None
        if self._entry.epoch == 0:
            return
        try:
            async with asyncio.timeout(_DEREGISTER_S):
                await self._context.registry.deregister(self._entry)
        except (TimeoutError, RollplexError):
            log.warning("could not deregister; the registration ends with its TTL")

    async def _beat(self) -> None:
        while True:
            due_s = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self._context.beat(max(0.0, time.monotonic() - due_s))

    def _signalled(self, number: signal.Signals) -> None:
        log.info("signal", extra={"signal": number.name})
        self._stop.set()

    def _cut_off_late(self) -> None:
        """End the process even if something in it blocks the loop, or a thread never ends."""
        limit_s = self._deadlines.drain_s + _CUT_OFF_AFTER_DRAIN_S

        def cut_off() -> None:
            log.error("still not stopped, cut off", extra={"limit_s": limit_s})
            logging.shutdown()
            os._exit(1)

        timer = threading.Timer(limit_s, cut_off)
        timer.daemon = True
        timer.start()


def _leaves_nothing_to_close(failure: BaseException | None) -> bool:
    if isinstance(failure, BaseExceptionGroup):
        return failure.subgroup(ProcessUnusable) is not None
    return isinstance(failure, ProcessUnusable)


def _end_at_once(failure: BaseException | None) -> NoReturn:
    log.critical("the process is unusable", exc_info=failure, extra={"pid": os.getpid()})
    logging.shutdown()
    os._exit(1)


def _failure_of(task: asyncio.Task[None]) -> BaseException | None:
    if not task.done():
        return None
    if task.cancelled():
        return FailedPrecondition(f"{task.get_name()} cancelled itself")
    return task.exception() or FailedPrecondition(f"{task.get_name()} ended by itself")
