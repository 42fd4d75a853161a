"""The training state of several ranks: its whole tensors, for files that know no ranks, and back.

Every rank calls the same methods in the same order: all but `take` and `load_weights` gather.

Shapes: Et elements of the trainable part of this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.vlm.checkpoint import load_checkpoint, save_checkpoint
from common.vlm.parallel.model import config_shape
from common.vlm.parallel.state import GlobalNorm, gather_trainable, save_shards, take_trainable
from services.learner.replicas import Replicas

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from common.worker.context import RunContext
    from common.worker.ranks import Ranks
    from common.worker.weights import ModelShape


class Sharding:
    """Of one run.

    Attributes:
        whole: layout of the model without tensor parallelism.
        leads: whether this rank gets what is gathered.
        replicas: that the trainable state is shared among; None: there is one.
        norm: of the gradients that all ranks update from, for `ready_gradients`.
    """

    def __init__(self, shape: ModelShape, ranks: Ranks) -> None:
        self._shape = shape
        self._mesh = ranks.mesh
        self._sizes = config_shape(shape.config)
        self.whole = shape.whole
        elements = shape.layout.trainable_elements
        self.replicas = None if ranks.replicas is None else Replicas(elements, ranks.replicas)
        self._first_replica = ranks.replicas is None or ranks.replicas.get_local_rank() == 0
        first_rank = ranks.mesh is None or ranks.mesh.get_local_rank() == 0
        self.leads = self._first_replica and first_rank
        self.norm = GlobalNorm(
            shape.layout,
            shape.parts,
            meshes=[mesh for mesh in (ranks.mesh, ranks.replicas) if mesh is not None],
            elements=None if self.replicas is None else self.replicas.own,
        )

    @classmethod
    def of(cls, context: RunContext, shape: ModelShape) -> Sharding | None:
        """None: the learner has one rank."""
        return None if context.joined is None else cls(shape, context.joined)

    def save_weights(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write configuration and whole weights of a replica; the first one's ranks do."""
        if not self._first_replica:
            return
        config = self._shape.config
        if self._mesh is None:
            save_checkpoint(folder, config, self.whole, tensors)
        else:
            save_shards(folder, config, self.whole, self._sizes, tensors, self._mesh)

    def load_weights(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read this rank's parts. Raises what `load_checkpoint` does."""
        load_checkpoint(folder, self._shape.layout, tensors, shards=self._shape.parts)

    def gather(self, flat: torch.Tensor) -> torch.Tensor | None:
        """All ranks' [Et] as one of the whole model, on the host; None where `leads` is not.

        Args: flat: on the host; of several replicas, the shares of the others are written.
        """
        if self.replicas is not None:
            self.replicas.gather(flat)
        if not self._first_replica:
            return None
        if self._mesh is None:
            return flat
        return gather_trainable(flat, self.whole, self._sizes, self._mesh)

    def take(self, whole: torch.Tensor, flat: torch.Tensor) -> None:
        """Fill [Et] of this rank from one of the whole model."""
        if self._shape.parts is None:
            flat.copy_(whole)
        else:
            take_trainable(whole, self.whole, self._shape.layout, self._shape.parts, flat)
