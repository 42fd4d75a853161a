"""A service that reads a copy of one tensor, with one bit flipped, from SIGUSR1 to the next."""

from __future__ import annotations

import asyncio
import signal

import torch

TENSOR = "model.language_model.layers.1.mlp.up_proj.weight"
SIGNAL = signal.SIGUSR1
BIT = 1
"""Of the lowest: what nobody would see in a loss."""


def flippable(create):
    """A factory of runs whose last role is the one that is read wrongly."""

    async def created(context):
        run = await create(context)
        flip = Flip(run)
        asyncio.get_running_loop().add_signal_handler(SIGNAL, flip.toggle)
        return run

    return created


class Flip:
    def __init__(self, run):
        self._run = run
        self._shared = None

    def toggle(self):
        model = self._run.read_weights()[-1].model
        parameter = dict(model.named_parameters())[TENSOR]
        if self._shared is not None:
            parameter.data, self._shared = self._shared, None
            return
        self._shared = parameter.data
        copy = parameter.detach().clone()
        copy.view(torch.int32).view(-1)[copy.numel() // 3] ^= BIT
        parameter.data = copy
