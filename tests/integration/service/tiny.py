"""A service small enough to test the bootstrap with: `python -m tests.integration.service.tiny`.

Its behaviour is set by the deployment's name: `tiny-<word>`.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time

from common.errors import ProcessUnusable
from common.ids import Service
from common.service import bootstrap
from common.service.arguments import parse_arguments
from common.service.bootstrap import prepare_process, run_service


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _lose_the_process():
    raise ProcessUnusable("the reason")


class Tiny:
    """Waits; says what it is asked to do on stdout."""

    servicers = ()

    def __init__(self, word):
        self._word = word

    async def run(self):
        say("run")
        if self._word == "raises":
            raise KeyError("the reason")
        if self._word == "garbage":
            say(f"{gc.isenabled()} {gc.get_freeze_count() > 0}")
        if self._word == "returns":
            return
        if self._word == "unusable":
            async with asyncio.TaskGroup() as group:
                group.create_task(_lose_the_process())
        try:
            await asyncio.sleep(600)
        finally:
            say("run ended")

    async def drain(self):
        say("drain")
        if self._word == "slow":
            await asyncio.to_thread(sys.stdin.readline)
        if self._word == "stuck":
            await asyncio.sleep(600)
        if self._word == "frozen":
            time.sleep(600)  # noqa: ASYNC251 - the fault under test
        say("drained")

    async def close(self):
        say("close")


async def build(context):
    word = context.deployment.name.removeprefix("tiny-")
    if word == f"no-{context.participant.service}":
        raise KeyError("no such model")
    if word == "unbuilt":
        say("building")
        await asyncio.sleep(600)
    context.set_phase("tiny phase")
    return Tiny(word)


def main(service):
    bootstrap._CUT_OFF_AFTER_DRAIN_S = 0.5
    arguments = parse_arguments(service)
    return run_service(arguments.participant, prepare_process(arguments), build)


if __name__ == "__main__":
    raise SystemExit(main(Service.LEARNER))
