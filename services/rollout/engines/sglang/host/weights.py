"""The engine's weights, in the process that computes: read in place, or copied again."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import torch

from common.tensors.device import HOST, DeviceBytes, map_pages
from common.tensors.mapping import Mapping
from common.tensors.spec import DType, TensorSpec
from common.tensors.views import device_tensor, host_tensor
from common.vlm.shape import read_shape
from common.weights.layout import WeightLayout
from services.rollout.engines.sglang.messages import ATTACH, DONE, FAILED, WeightMemory
from services.rollout.engines.sglang.placement import PlacedParameter, place
from services.rollout.engines.sglang.wire import Frame, receive, send

if TYPE_CHECKING:
    from collections import abc
    from collections.abc import Sequence

    from torch import Tensor, nn

ADDRESS = "ROLLPLEX_SGLANG_WEIGHTS"
"""Environment variable with the name of the socket that `attach` asks."""


class BoundWeights:
    """A model whose parameters are the policy's weights."""

    def __init__(
        self,
        parameters: abc.Mapping[str, Tensor],
        placed: Sequence[PlacedParameter],
        flat_E: Tensor,
    ) -> None:
        self._flat_E = flat_E
        self._copied: list[tuple[Tensor, PlacedParameter]] = []
        self.aliased_bytes = self.copied_bytes = 0
        # a tied parameter has two names
        for one in {id(parameters[one.name]): one for one in placed}.values():
            parameter, size_bytes = parameters[one.name], one.numel * flat_E.element_size()
            if one.alias:
                parameter.data = one.view(flat_E, parameter)
                self.aliased_bytes += size_bytes
            else:
                parameter.data.zero_()
                self._copied.append((parameter, one))
                self.copied_bytes += size_bytes
        if flat_E.is_cuda:
            torch.cuda.empty_cache()  # what the parameters were made with

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy what is not read in place."""
        for parameter, one in self._copied:
            one.copy(self._flat_E, parameter.data)


_bound: BoundWeights | None = None


def attach(model: nn.Module, *, rank: int, ranks: int) -> None:
    """Account for every parameter of a rank's model, and bind it if there is memory to read.

    Whoever listens at `ADDRESS` is told the rank and sends a frame with `WeightMemory`, or without:
    then the weights come in buckets. The answer has the bytes by kind, or what is wrong.

    Raises: as `place` does, after the answer.
    """
    global _bound
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.connect("\0" + os.environ[ADDRESS])
        send(channel, Frame(kind=ATTACH, body={"rank": rank}))
        asked = receive(channel)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        layout = WeightLayout.from_json(asked.body["layout"])
        try:
            shape = read_shape(asked.body["model_path"])
            placed = place(parameters, layout, shape, ranks=ranks)
            total = layout.total_elements
            body = {"aliased_bytes": 0, "copied_bytes": 0}
            if asked.body["memory"] is not None:
                memory = WeightMemory(**asked.body["memory"])
                flat_E = _map(memory, asked.descriptors[0], layout.dtype, total)
                _bound = BoundWeights(parameters, placed, flat_E)
                body = {
                    "aliased_bytes": _bound.aliased_bytes,
                    "copied_bytes": _bound.copied_bytes,
                }
        except Exception as error:
            send(channel, Frame(kind=FAILED, body={"message": f"{type(error).__name__}: {error}"}))
            raise
        send(channel, Frame(kind=DONE, body=body))


def refresh(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """SGLang's custom weight loader: the bound memory has other contents."""
    del model, named_tensors
    if _bound is not None:
        _bound.refresh()


REFRESH_LOADER = f"{refresh.__module__}.{refresh.__qualname__}"
"""How SGLang is told of `refresh`."""


def _map(memory: WeightMemory, descriptor: int, dtype: str, elements: int) -> Tensor:
    """[E], for as long as a view of it lives."""
    spec = TensorSpec(
        name="flat", dtype=DType(dtype), shape=(elements,), offset_bytes=memory.offset_bytes
    )
    if memory.device == HOST:
        mapping = Mapping.of_fd(
            descriptor, name="policy.weights", size_bytes=memory.size_bytes, specs=[spec]
        )
        return host_tensor(mapping.view("flat"), spec)
    pages = map_pages(memory.device, descriptor, memory.size_bytes)
    return device_tensor(DeviceBytes(pages, spec.offset_bytes, spec.nbytes), spec)
