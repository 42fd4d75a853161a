"""The responses of one group as they lie in the rollout's lease.

Shapes: G responses, T tokens of all of them, packed without padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.tensors.views import tensor_view

if TYPE_CHECKING:
    from common.tensors.lease import Lease
    from common.worker.scope import TensorShape

TOKENS = "tokens"
LENGTHS = "lengths"
LOGPROBS = "logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedResponses:
    """What the rollout sampled for one group."""

    tokens: torch.Tensor
    """[T] int64."""
    lengths: tuple[int, ...]
    """Tokens of each response; 0 is legal."""
    engine_logprobs: torch.Tensor
    """[T] float32, as the engine saw them when it sampled."""

    def to(self, device: torch.device) -> PackedResponses:
        """The same responses on another device; lengths stay on the host."""
        return PackedResponses(
            tokens=self.tokens.to(device),
            lengths=self.lengths,
            engine_logprobs=self.engine_logprobs.to(device),
        )

    def parts(self, *, packed: bool) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        """Tokens and lengths of what one pass takes: all responses, or each alone."""
        if packed:
            return [(self.tokens, self.lengths)]
        alone = self.tokens.split(self.lengths)
        return [(tokens, (len(tokens),)) for tokens in alone]


def response_tensors(tokens: int, responses: int) -> dict[str, TensorShape]:
    """Dtypes and shapes of the lease for so many tokens and responses."""
    return {
        TOKENS: (torch.int64, (tokens,)),
        LENGTHS: (torch.int64, (responses,)),
        LOGPROBS: (torch.float32, (tokens,)),
    }


def packed_responses(lease: Lease) -> PackedResponses:
    """The responses in a lease, as views of it."""
    return PackedResponses(
        tokens=tensor_view(lease, TOKENS),
        lengths=tuple(tensor_view(lease, LENGTHS).tolist()),
        engine_logprobs=tensor_view(lease, LOGPROBS),
    )
