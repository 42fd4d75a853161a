"""The local supervisor: start it, ask it, stop it. It alone starts and ends the processes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import xmlrpc.client
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
from supervisor.xmlrpc import SupervisorTransport

from common.errors import FailedPrecondition, Unavailable
from deploy.local.programs import (
    config_file,
    pid_file,
    programs,
    render,
    resolved_file,
    supervisor_log,
)

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.deployment import Deployment

_ANSWER_S = 20.0
_POLL_S = 0.1
_SPAWNED = re.compile(r"INFO spawned: '([^']+)' with pid")
_STARTED = "supervisord started with pid"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramState:
    """One program as the supervisor sees it.

    Attributes:
        name: such as `learner-0`.
        state: STARTING, RUNNING, BACKOFF, STOPPING, STOPPED, EXITED or FATAL.
        pid: 0: no process.
        up_s: age of the process.
        restarts: starts since `up`, less one.
        description: the supervisor's own words.
    """

    name: str
    state: str
    pid: int
    up_s: int
    restarts: int
    description: str


class Supervisor:
    """The supervisor of one deployment, running or not."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    def pid(self) -> int | None:
        """Pid of the running supervisor of this deployment; None: none runs."""
        process = self._process()
        return process.pid if process is not None else None

    def start(self, *, package: str, folder: Path) -> None:
        """Write the configuration and start the supervisor in the background.

        It may run already, with the same configuration; then nothing happens.

        Raises:
            FailedPrecondition: it runs with another configuration, or did not start.
        """
        deployment = self._deployment
        text = render(deployment, programs(deployment, package=package), folder=folder)
        resolved = deployment.resolved_json()
        if self.pid() is not None:
            if config_file(deployment).read_text() == text and (
                resolved_file(deployment).read_text() == resolved
            ):
                return
            raise FailedPrecondition(
                f"the services in {deployment.state_dir} run already, with another configuration; "
                f"end them first with `python -m deploy.local down`"
            )
        for path, contents in (
            (config_file(deployment), text),
            (resolved_file(deployment), resolved),
        ):
            path.touch(mode=0o600)
            path.write_text(contents)
        started = subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-m", "supervisor.supervisord", "-c", str(config_file(deployment))],
            capture_output=True,
            text=True,
            check=False,
        )
        if started.returncode != 0:
            raise FailedPrecondition(
                f"the supervisor did not start (exit code {started.returncode}): "
                f"{started.stderr.strip() or started.stdout.strip()}"
            )
        self._wait_for_answer()

    def states(self) -> list[ProgramState]:
        """All programs, in the order of their start; empty: no supervisor runs.

        Raises:
            Unavailable: it runs and does not answer.
        """
        if self.pid() is None:
            return []
        try:
            infos = self._call("getAllProcessInfo")
        except (OSError, xmlrpc.client.Error) as error:
            raise Unavailable(
                f"the supervisor (pid {self.pid()}) does not answer at "
                f"{self._deployment.supervisor_socket}: {error}"
            ) from error
        spawned = self._spawned()
        return [
            ProgramState(
                name=info["name"],
                state=info["statename"],
                pid=info["pid"],
                up_s=info["now"] - info["start"] if info["pid"] else 0,
                restarts=max(0, spawned.get(info["name"], 0) - 1),
                description=info["description"] or info["spawnerr"],
            )
            for info in sorted(infos, key=lambda info: self._order(info["name"]))
        ]

    def stop(self) -> bool:
        """End all programs, then the supervisor. False: none was running.

        Raises:
            Unavailable: it is still there after all its programs' deadlines.
        """
        process = self._process()
        if process is None:
            return False
        # SIGTERM and the call `shutdown` do the same; the signal needs no socket.
        process.terminate()
        listed = programs(self._deployment)
        limit_s = sum(program.stop_wait_s for program in listed) + _ANSWER_S
        try:
            process.wait(limit_s)
        except psutil.TimeoutExpired as error:
            raise Unavailable(
                f"the supervisor (pid {process.pid}) is still there after {limit_s:.0f} s"
            ) from error
        pid_file(self._deployment).unlink(missing_ok=True)
        return True

    def _process(self) -> psutil.Process | None:
        try:
            pid = int(pid_file(self._deployment).read_text())
            process = psutil.Process(pid)
            ours = str(config_file(self._deployment)) in process.cmdline()
            return process if ours and process.status() != psutil.STATUS_ZOMBIE else None
        except (OSError, ValueError, psutil.Error):
            # No pid file, or one that an ended supervisor left; the pid may be someone else's now.
            return None

    def _call(self, method: str) -> Any:
        transport = SupervisorTransport(
            None, None, serverurl=f"unix://{self._deployment.supervisor_socket}"
        )
        try:
            rpc = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)
            return getattr(rpc.supervisor, method)()
        finally:
            transport.close()

    def _wait_for_answer(self) -> None:
        give_up_s = time.monotonic() + _ANSWER_S
        while True:
            try:
                self._call("getState")
            except (OSError, xmlrpc.client.Error) as error:
                if time.monotonic() > give_up_s:
                    raise FailedPrecondition(
                        f"the supervisor was started and does not answer: {error}; see "
                        f"{supervisor_log(self._deployment)}"
                    ) from error
                time.sleep(_POLL_S)
            else:
                return

    def _spawned(self) -> dict[str, int]:
        """Starts of each program since the supervisor's own, counted in its log."""
        counts: dict[str, int] = {}
        for line in supervisor_log(self._deployment).read_text(errors="replace").splitlines():
            if _STARTED in line:
                counts.clear()
            elif found := _SPAWNED.search(line):
                counts[found[1]] = counts.get(found[1], 0) + 1
        return counts

    def _order(self, name: str) -> int:
        names = [program.name for program in programs(self._deployment)]
        return names.index(name) if name in names else len(names)


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)
