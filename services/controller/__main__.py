"""`python -m services.controller --config deployment.toml`."""

from __future__ import annotations

import sys

from common.ids import Service
from common.service.arguments import parse_arguments


def main() -> int:
    """Run the controller until SIGTERM. Returns: the exit code."""
    arguments = parse_arguments(Service.CONTROLLER)
    from common.service.bootstrap import prepare_process, run_service

    deployment = prepare_process(arguments)
    from services.controller.service import ControllerService

    return run_service(arguments.participant, deployment, ControllerService.build)


if __name__ == "__main__":
    sys.exit(main())
