"""Entry point of the host: SGLang's engine, asked by the rollout service over a socket.

It runs in the environment that has SGLang, and imports little of this project: torch, NumPy and
safetensors, and no transformers beyond what SGLang itself takes.
"""

from __future__ import annotations

import os
import socket

from services.rollout.engines.sglang.host.arguments import (
    engine_arguments,
    engine_environment,
    unset_variables,
)
from services.rollout.engines.sglang.host.handshake import WeightHandshake
from services.rollout.engines.sglang.host.life import end_with
from services.rollout.engines.sglang.messages import DONE, FAILED, START, EngineSettings
from services.rollout.engines.sglang.wire import Frame, receive, send


def run(channel_descriptor: int, life_descriptor: int) -> None:
    """Start the engine that the service describes, and serve it until it stops.

    Args:
        channel_descriptor: a connected socket to the service.
        life_descriptor: a pipe that is open for as long as the service lives.
    """
    end_with(life_descriptor)
    for descriptor in (channel_descriptor, life_descriptor):
        os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=channel_descriptor)
    start = receive(channel)
    assert start.kind == START
    settings = EngineSettings(**start.body["settings"])
    offers = [{**rank, "model_path": settings.model_path} for rank in start.body["ranks"]]
    handshake = WeightHandshake(
        offers, tuple(start.descriptors), refused=lambda frame: send(channel, frame)
    )
    with handshake as weights:
        os.environ.update(engine_environment(settings, weights.address))
        for name in unset_variables(settings):
            os.environ.pop(name, None)
        try:
            # SGLang reads the environment when it is imported
            from sglang.srt.entrypoints.engine import Engine

            engine = Engine(**engine_arguments(settings))
            attached = weights.attached()
            places = engine.get_server_info()["max_total_num_tokens"]
        except BaseException as error:
            if not weights.refused:
                message = f"{type(error).__name__}: {error}"
                send(channel, Frame(kind=FAILED, body={"message": message}))
            raise
    send(channel, Frame(kind=DONE, body=attached))
    from services.rollout.engines.sglang.host.serving import Serving

    prompts_stay = places >= settings.step_tokens
    serving = Serving(engine, channel, ranks=settings.ranks, prompts_stay=prompts_stay)
    engine.loop.run_until_complete(serving.run())
    engine.shutdown()
