"""The memory broker, with the node's event hub."""

from __future__ import annotations

import sys

from common.ids import Service
from common.service.arguments import parse_arguments
from common.service.bootstrap import prepare_process, run_service


def main() -> int:
    """Run the broker's process; returns its exit code."""
    arguments = parse_arguments(Service.BROKER)
    deployment = prepare_process(arguments)
    from services.broker.service import BrokerService

    return run_service(arguments.participant, deployment, BrokerService.create)


if __name__ == "__main__":
    sys.exit(main())
