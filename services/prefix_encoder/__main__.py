"""The prefix-encoder: prompts, vision, prefixes of both roles."""

from __future__ import annotations

import sys

from common.data.forkserver import forkserver
from common.ids import Service
from common.service.arguments import parse_arguments
from common.service.bootstrap import prepare_process, run_service


def main() -> int:
    """Run one process of this service; returns its exit code."""
    arguments = parse_arguments(Service.PREFIX_ENCODER)
    deployment = prepare_process(arguments)
    forkserver()
    from common.worker.service import worker_builder
    from services.prefix_encoder.run import PrefixEncoderRun

    return run_service(arguments.participant, deployment, worker_builder(PrefixEncoderRun.create))


if __name__ == "__main__":
    sys.exit(main())
