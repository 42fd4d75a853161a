"""The rollout: decode and rewards."""

from __future__ import annotations

import sys

from common.ids import Service
from common.service.arguments import parse_arguments
from common.service.bootstrap import prepare_process, run_service


def main() -> int:
    """Run one process of this service; returns its exit code."""
    arguments = parse_arguments(Service.ROLLOUT)
    deployment = prepare_process(arguments)
    from common.worker.service import worker_builder
    from services.rollout.run import RolloutRun

    return run_service(arguments.participant, deployment, worker_builder(RolloutRun.create))


if __name__ == "__main__":
    sys.exit(main())
