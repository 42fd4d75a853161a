"""The training state of several ranks: its whole tensors, for files that know no ranks, and back.

Every rank calls the same methods in the same order: all but `take` and `load_weights` gather.

Shapes: E elements of all weights of this rank, Et of its trainable part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.vlm.checkpoint import load_checkpoint
from common.vlm.parallel.model import config_shape
from common.vlm.parallel.state import GlobalNorm, gather_trainable, save_shards, take_trainable

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from common.worker.context import RunContext
    from common.worker.weights import ModelShape


class Sharding:
    """Of one run.

    Attributes:
        whole: layout of the model without tensor parallelism.
        leads: whether this rank gets what is gathered.
        norm: of the gradients of all ranks, for `ready_gradients`.
    """

    def __init__(self, shape: ModelShape, mesh: DeviceMesh) -> None:
        assert shape.parts is not None
        self._mesh = mesh
        self._shape = shape
        self._parts = shape.parts
        self._sizes = config_shape(shape.config)
        self.whole = shape.whole
        self.leads = mesh.get_local_rank() == 0
        self.norm = GlobalNorm(shape.layout, shape.parts, mesh)

    @classmethod
    def of(cls, context: RunContext, shape: ModelShape) -> Sharding | None:
        """None: the learner has one rank."""
        return None if context.tensor is None else cls(shape, context.tensor.mesh)

    def save_weights(self, folder: Path, flat: torch.Tensor) -> None:
        """Write configuration and whole weights of all ranks' [E]; rank 0 does."""
        save_shards(folder, self._shape.config, self.whole, self._sizes, flat, self._mesh)

    def load_weights(self, folder: Path, flat: torch.Tensor) -> None:
        """Read this rank's parts into [E]. Raises what `load_checkpoint` does."""
        load_checkpoint(folder, self._shape.layout, flat, shards=self._parts)

    def gather(self, flat: torch.Tensor) -> torch.Tensor | None:
        """All ranks' [Et] as one of the whole model, on the host; None where `leads` is not."""
        return gather_trainable(flat, self.whole, self._sizes, self._mesh)

    def take(self, whole: torch.Tensor, flat: torch.Tensor) -> None:
        """Fill [Et] of this rank from one of the whole model."""
        take_trainable(whole, self.whole, self._shape.layout, self._parts, flat)
