"""The node as a whole: bring it up, look at it."""

from __future__ import annotations

import asyncio
import http.client
import logging
import time
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import RollplexError, Unavailable
from common.registry.client import Registry
from common.registry.embedded import wait_ready
from deploy.local.logs import tail
from deploy.local.precheck import check
from deploy.local.programs import SERVICES_PACKAGE, Program, node_mps, programs
from deploy.local.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.config.deployment import Deployment
    from common.registry.client import ServiceEntry
    from deploy.local.supervisor import ProgramState

log = logging.getLogger(__name__)

SERVING = "serving"
_POLL_S = 0.2
_LOST_AFTER_RESTARTS = 2
"""A program that ended that often while `up` waits will not serve without help."""
_TAIL_LINES = 20
_HTTP_ANSWER_S = 2.0
_REDIS_ANSWER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program, seen from the supervisor, the registry and its own health check.

    Attributes:
        program: what it is.
        state: as the supervisor sees it; None: the supervisor does not run.
        entry: its registration, if it is this very process's; None: not registered.
        health: `serving`, or what is in the way.
    """

    program: Program
    state: ProgramState | None
    entry: ServiceEntry | None
    health: str


def up(
    deployment: Deployment, *, package: str = SERVICES_PACKAGE, folder: Path | None = None
) -> list[Row]:
    """Check, start, and wait until every service is serving.

    Args:
        deployment: the node.
        package: where the services' modules are.
        folder: their working folder; None: the current one.

    Raises:
        PrecheckFailed: something is wrong; nothing was started.
        Unavailable: not all were serving within `deadlines.start_s`, or one keeps ending; the
            message has the end of their logs. What was started keeps running.
    """
    supervisor = Supervisor(deployment)
    if supervisor.pid() is None:
        check(deployment, package=package)
    _prepare_mps(deployment)
    supervisor.start(package=package, folder=folder or Path.cwd())
    give_up_s = time.monotonic() + deployment.deadlines.start_s
    earlier = {state.name: state.restarts for state in supervisor.states()}
    while True:
        rows = status(deployment)
        missing = [row for row in rows if row.health != SERVING]
        if not missing:
            return rows
        lost = any(_is_lost(row, earlier) for row in missing)
        if lost or time.monotonic() > give_up_s:
            raise Unavailable(_explain(deployment, missing))
        time.sleep(_POLL_S)


def _prepare_mps(deployment: Deployment) -> None:
    mps = node_mps(deployment)
    if mps is not None:
        mps.make_folders()
    elif deployment.device == "cuda":
        log.warning(
            "WARNING: no MPS: the services will take turns on the GPU, so work hidden in the "
            "decode window gains nothing. Install NVIDIA's driver tools, or do not set mps = off."
        )


def status(deployment: Deployment) -> list[Row]:
    """Every program of the node, whether it runs or not."""
    states = {state.name: state for state in Supervisor(deployment).states()}
    entries, redis = asyncio.run(_look(deployment)) if states else ({}, "the supervisor is down")
    rows = []
    for program in programs(deployment):
        state = states.get(program.name)
        entry = entries.get(str(program.participant))
        if entry is not None and state is not None and entry.pid != state.pid:
            entry = None
        rows.append(
            Row(program=program, state=state, entry=entry, health=_health(state, entry, redis))
            if program.participant is not None
            else Row(program=program, state=state, entry=None, health=_down(state) or redis)
        )
    return rows


async def _look(deployment: Deployment) -> tuple[dict[str, ServiceEntry], str]:
    """The registrations, and the health of Redis."""
    registry = Registry.of(deployment, deadline_s=_REDIS_ANSWER_S)
    try:
        await wait_ready(deployment.redis_url, timeout_s=_REDIS_ANSWER_S)
        entries = {str(entry.participant): entry for entry in await registry.services()}
    except RollplexError as error:
        return {}, str(error)
    finally:
        await registry.close()
    return entries, SERVING


def _is_lost(row: Row, earlier: Mapping[str, int]) -> bool:
    """Whether waiting longer for this program is of no use."""
    if row.state is None or row.state.state == "FATAL":
        return True
    return row.state.restarts - earlier.get(row.state.name, 0) >= _LOST_AFTER_RESTARTS


def _down(state: ProgramState | None) -> str | None:
    if state is None:
        return "not started"
    if state.pid == 0:
        return f"no process: {state.description}" if state.description else "no process"
    return None


def _health(state: ProgramState | None, entry: ServiceEntry | None, redis: str) -> str:
    down = _down(state)
    if down is not None:
        return down
    if entry is None:
        return "not registered yet" if redis == SERVING else "cannot register: Redis is away"
    host, _, port = entry.http_address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_HTTP_ANSWER_S)
    try:
        connection.request("GET", "/healthz")
        reply = connection.getresponse()
        reason = reply.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"no answer at {entry.http_address}: {error}"
    finally:
        connection.close()
    return SERVING if reply.status == HTTPStatus.OK else reason


def _explain(deployment: Deployment, missing: list[Row]) -> str:
    parts = [
        f"{len(missing)} of the node's programs are not serving, though deadlines.start_s = "
        f"{deployment.deadlines.start_s:g} s have passed or one of them keeps ending. They keep "
        f"being tried; `python -m deploy.local status` looks again, `down` ends everything."
    ]
    for row in missing:
        log_file = row.program.log_file(deployment)
        parts.append(f"\n{row.program.name}: {row.health}; the end of {log_file}:")
        parts += [f"  {line}" for line in tail(log_file, _TAIL_LINES)] or ["  (empty)"]
    return "\n".join(parts)
