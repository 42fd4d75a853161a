"""Log-probabilities of tokens whose logits are spread over the ranks.

Shapes: T = tokens, C = vocabulary, c = ids of this rank, h = hidden width.

``loss_parallel`` of torch is not used: it has to be entered around every backward too, and it
replaces operators of the whole process while it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.vlm.checkpointing import run_block
from common.vlm.logprobs import scaled_logits
from common.vlm.parallel.modules import group_maximum, group_sum

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def parallel_logprobs(
    head: Any,
    hidden: Tensor,
    tokens: Tensor,
    mesh: DeviceMesh,
    *,
    temperature: float,
    suppressed: Tensor | None,
    chunk_tokens: int,
) -> Tensor:
    """As `common.vlm.logprobs.hidden_logprobs`, each rank with its own ids' logits.

    Three numbers a token cross the ranks forward, and the hidden states' gradient backward.

    Args:
        head: from [T, h] to this rank's [T, c].
        hidden: [T, h], normed, equal on all ranks.
        tokens: [T] int64, equal on all ranks.
        mesh: of the ranks.
        temperature: positive.
        suppressed: [n] int64 ids that may not be sampled, or None.
        chunk_tokens: rows at a time.
    Returns: [T] float32, or float64 for float64 hidden states; equal on all ranks.
    """

    def chunk(part: Tensor, part_tokens: Tensor) -> Tensor:
        logits = head(part)
        first = mesh.get_local_rank() * logits.shape[1]
        here = None
        if suppressed is not None:
            inside = (suppressed >= first) & (suppressed < first + logits.shape[1])
            here = suppressed[inside] - first
        scaled = scaled_logits(logits, temperature, here)
        return _ChosenLogprobs.apply(scaled, part_tokens - first, mesh)

    parts = [
        run_block(chunk, part, part_tokens, checkpointing=True)
        for part, part_tokens in zip(
            hidden.split(chunk_tokens), tokens.split(chunk_tokens), strict=True
        )
    ]
    return torch.cat(parts)


class _ChosenLogprobs(torch.autograd.Function):
    """Log-probabilities [T] from this rank's scaled logits [T, c]."""

    @staticmethod
    def forward(ctx: Any, scaled: Tensor, local: Tensor, mesh: DeviceMesh) -> Tensor:
        width = scaled.shape[1]
        absent = (local < 0) | (local >= width)
        index = local.masked_fill(absent, 0)[:, None]
        highest = group_maximum(scaled.amax(dim=1), mesh)
        weights = (scaled - highest[:, None]).exp()
        chosen = (scaled.gather(1, index)[:, 0] - highest).masked_fill(absent, 0)
        total, picked = group_sum(torch.stack((weights.sum(dim=1), chosen)), mesh)
        ctx.save_for_backward(weights, total, index, absent)
        return picked - total.log()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights, total, index, absent = ctx.saved_tensors
        result = weights * (-gradient / total)[:, None]
        own = gradient.masked_fill(absent, 0)[:, None]
        return result.scatter_add(1, index, own), None, None
