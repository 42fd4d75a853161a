"""What the supervisor runs, and its configuration file."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.config.base import ConfigError
from common.gpu.mps import Mps, MpsUnavailable, find_daemon
from common.ids import WORKERS
from common.registry.embedded import embedded_server

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.deployment import Deployment
    from common.ids import Participant

REDIS = "redis"
MPS = "mps"
SERVICES_PACKAGE = "services"

START_RETRIES = 20
"""Failed starts in a row before the supervisor gives a program up; it waits a second longer before
each."""
STARTED_AFTER_S = 3
"""A program that ends sooner counts as a failed start, and is started again more and more slowly;
one that ends later is started again at once."""
_STOP_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One process under the supervisor.

    Attributes:
        name: in the supervisor and of the log file, such as `learner-0`.
        command: the command line.
        participant: who it is in the registry; None: not a service of this project.
        priority: programs are started in this order and stopped in the reverse one, the workers
            all at once.
        stop_wait_s: from SIGTERM to SIGKILL.
    """

    name: str
    command: tuple[str, ...]
    participant: Participant | None
    priority: int
    stop_wait_s: float

    def log_file(self, deployment: Deployment) -> Path:
        """Where its stdout and stderr go."""
        return deployment.log_dir / f"{self.name}.log"


def resolved_file(deployment: Deployment) -> Path:
    """The deployment as the services read it: every value settled."""
    return deployment.state_dir / "deployment.json"


def config_file(deployment: Deployment) -> Path:
    """The supervisor's configuration."""
    return deployment.state_dir / "supervisord.conf"


def pid_file(deployment: Deployment) -> Path:
    """The supervisor's own pid."""
    return deployment.state_dir / "supervisord.pid"


def supervisor_log(deployment: Deployment) -> Path:
    """The supervisor's own log."""
    return deployment.log_dir / "supervisord.log"


def programs(deployment: Deployment, *, package: str = SERVICES_PACKAGE) -> list[Program]:
    """Every program of the node, in the order of their start.

    Raises:
        FailedPrecondition: the node has to run Redis itself and there is no server program.
    """
    found = []
    redis = embedded_server(deployment)
    if redis is not None:
        found.append(
            Program(
                name=REDIS,
                command=tuple(redis.command),
                participant=None,
                priority=0,
                stop_wait_s=_STOP_GRACE_S,
            )
        )
    mps = node_mps(deployment)
    if mps is not None:
        found.append(
            Program(
                name=MPS,
                command=(find_daemon(), "-f"),
                participant=None,
                priority=1,
                stop_wait_s=_STOP_GRACE_S,
            )
        )
    for index, participant in enumerate(deployment.participants):
        module = f"{package}.{participant.service.value.replace('-', '_')}"
        command = (
            *(sys.executable, "-m", module),
            *("--config", str(resolved_file(deployment))),
            *("--rank", str(participant.rank)),
        )
        found.append(
            Program(
                name=f"{participant.service}-{participant.rank}",
                command=command,
                participant=participant,
                priority=10 + index,
                stop_wait_s=deployment.deadlines.drain_s + _STOP_GRACE_S,
            )
        )
    return found


def node_mps(deployment: Deployment) -> Mps | None:
    """The node's Multi-Process Service; None: it computes on the CPU, or has no such daemon."""
    if deployment.device != "cuda" or deployment.mps == "off":
        return None
    try:
        find_daemon()
    except MpsUnavailable:
        return None
    return Mps(folder=deployment.socket_dir / MPS)


def render(deployment: Deployment, found: list[Program], *, folder: Path) -> str:
    """The supervisor's configuration file.

    Args:
        deployment: the node.
        found: what to run.
        folder: working folder of all programs, for relative paths in recipes.
    """
    head = f"""\
[unix_http_server]
file = {_plain(deployment.supervisor_socket)}
chmod = 0600

[supervisord]
identifier = rollplex-{deployment.name}
directory = {_plain(folder)}
pidfile = {_plain(pid_file(deployment))}
logfile = {_plain(supervisor_log(deployment))}
logfile_maxbytes = 0
childlogdir = {_plain(deployment.log_dir)}
umask = 077
nocleanup = true

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
"""
    # One group ends at once; groups end one after the other, the one with the highest number first.
    workers = [p.name for p in found if p.participant and p.participant.service in WORKERS]
    group = f"""\
[group:workers]
programs = {",".join(workers)}
priority = {found[-1].priority}
"""
    return "\n".join([head, *(_section(deployment, program) for program in found), group])


def _section(deployment: Deployment, program: Program) -> str:
    return f"""\
[program:{program.name}]
command = {_plain(shlex.join(program.command))}
priority = {program.priority}
autostart = true
autorestart = true
startsecs = {STARTED_AFTER_S}
startretries = {START_RETRIES}
stopsignal = TERM
stopwaitsecs = {int(program.stop_wait_s) + 1}
stopasgroup = true
killasgroup = true
redirect_stderr = true
stdout_logfile = {_plain(program.log_file(deployment))}
stdout_logfile_maxbytes = 64MB
stdout_logfile_backups = 2
environment = {_environment(deployment)}
"""


def _environment(deployment: Deployment) -> str:
    mps = node_mps(deployment)
    values = {"PYTHONUNBUFFERED": "1", **(mps.environment if mps is not None else {})}
    return ",".join(f'{name}="{_plain(value)}"' for name, value in values.items())


def _plain(value: Path | str) -> str:
    """The value as it is; the supervisor's file format has no way to quote these characters."""
    text = str(value)
    for refused in ("%", "\n", " ;"):
        if refused in text:
            raise ConfigError(
                f"{text!r} has {refused!r} in it, which the supervisor's configuration cannot "
                f"hold; choose another state_dir or working folder"
            )
    return text
