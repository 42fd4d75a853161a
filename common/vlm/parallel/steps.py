"""The steps between attentions on one rank's shards.

Shapes: R = rows, T = tokens, C = vocabulary, c = ids of this rank, h = hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.vlm.parallel.logprobs import parallel_logprobs
from common.vlm.parallel.modules import sharded
from common.vlm.steps import PlainSteps

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


class ParallelSteps(PlainSteps):
    """The sharded modules; where all ranks' logits are needed, collectives of the vocabulary."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh

    def logits(self, head: Any, hidden: Tensor) -> Tensor:
        """[R, C] of [R, h]: gathered, so that every rank samples the same token."""
        return sharded(head(hidden), self._mesh, axis=1).full_tensor()

    def logprobs(
        self,
        head: Any,
        hidden: Tensor,
        tokens: Tensor,
        *,
        temperature: float,
        suppressed: Tensor | None,
        chunk_tokens: int,
    ) -> Tensor:
        """See `parallel_logprobs`."""
        return parallel_logprobs(
            head,
            hidden,
            tokens,
            self._mesh,
            temperature=temperature,
            suppressed=suppressed,
            chunk_tokens=chunk_tokens,
        )
