"""The image's health check: asks the service that this container runs.

`python -m deploy.containers.healthcheck` finds the service and its deployment in the command line
of process 1 and reads `/healthz`. It exits with 0 if the service can take work, else with 1 and a
line that says why.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from itertools import pairwise
from pathlib import Path

from common.config.base import ConfigError
from common.config.deployment import load_deployment
from common.ids import Service
from common.service.arguments import parse_arguments

FIRST_PROCESS = Path("/proc/1/cmdline")

_MODULE_PREFIX = "services."
_ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - compared with, not bound to
_TIMEOUT_S = 3.0


class NotAService(Exception):
    """The container's first process is none of the services."""


def service_address(cmdline: bytes) -> str:
    """Where the service with this command line answers over HTTP, as `host:port`.

    Args:
        cmdline: arguments, each ended by a zero byte, as in `/proc/<pid>/cmdline`.

    Raises:
        NotAService: no `-m services.<name>` in it, or the system picked its port.
        ConfigError: its deployment cannot be read.
    """
    arguments = [part.decode() for part in cmdline.split(b"\0") if part]
    service, rest = _split(arguments)
    parsed = parse_arguments(service, rest)
    deployment = load_deployment(parsed.config, parsed.sets)
    host, _, port = deployment.http_address(parsed.participant).rpartition(":")
    if port == "0":
        raise NotAService(f"{parsed.participant} has no fixed http_port, so it cannot be asked")
    return f"{'127.0.0.1' if host == _ANY_ADDRESS else host}:{port}"


def main(first_process: Path = FIRST_PROCESS) -> int:
    """Check the health; returns the exit code."""
    try:
        address = service_address(first_process.read_bytes())
        url = f"http://{address}/healthz"
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
            sys.stdout.write(reply.read().decode())
    except urllib.error.HTTPError as error:
        sys.stdout.write(error.read().decode())
        return 1
    except (NotAService, ConfigError, OSError) as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


def _split(arguments: list[str]) -> tuple[Service, list[str]]:
    for index, (flag, module) in enumerate(pairwise(arguments)):
        if flag == "-m" and module.startswith(_MODULE_PREFIX):
            name = module.removeprefix(_MODULE_PREFIX).replace("_", "-")
            return Service(name), arguments[index + 2 :]
    raise NotAService(f"process 1 runs no service: {' '.join(arguments)}")


if __name__ == "__main__":
    sys.exit(main())
