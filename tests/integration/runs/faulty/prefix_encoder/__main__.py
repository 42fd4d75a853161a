from __future__ import annotations

import sys

from common.ids import Service
from common.service.arguments import parse_arguments
from common.service.bootstrap import prepare_process, run_service


def main() -> int:
    arguments = parse_arguments(Service.PREFIX_ENCODER)
    deployment = prepare_process(arguments)
    from common.worker.service import worker_builder
    from services.prefix_encoder.run import PrefixEncoderRun
    from tests.integration.runs.faulty.flip import flippable

    return run_service(
        arguments.participant, deployment, worker_builder(flippable(PrefixEncoderRun.create))
    )


if __name__ == "__main__":
    sys.exit(main())
