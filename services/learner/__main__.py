"""The learner: response training, updates, checkpoints."""

from __future__ import annotations

import sys

from common.ids import Service
from common.service.arguments import parse_arguments
from common.service.bootstrap import prepare_process, run_service


def main() -> int:
    """Run one process of this service; returns its exit code."""
    arguments = parse_arguments(Service.LEARNER)
    deployment = prepare_process(arguments)
    from common.worker.service import worker_builder
    from services.learner.run import LearnerRun

    return run_service(arguments.participant, deployment, worker_builder(LearnerRun.create))


if __name__ == "__main__":
    sys.exit(main())
