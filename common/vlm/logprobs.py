"""Log-probabilities of chosen tokens, without all logits at once.

Shapes: T = tokens, h = hidden width, C = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.vlm.checkpointing import run_block


def scaled_logits(logits: Tensor, temperature: float, suppressed: Tensor | None) -> Tensor:
    """The logits that sampling uses, in float32 or better.

    Args:
        logits: [T, C].
        temperature: positive.
        suppressed: [n] int64 ids that may not be sampled, or None.
    Returns: [T, C] float32 (float64 for float64 logits); suppressed ids at minus infinity.
    """
    precise = logits if logits.dtype == torch.float64 else logits.float()
    scaled = precise / temperature
    return scaled if suppressed is None else scaled.index_fill(1, suppressed, float("-inf"))


def chosen_logprobs(
    logits: Tensor, tokens: Tensor, *, temperature: float, suppressed: Tensor | None
) -> Tensor:
    """Log-probability [T] of `tokens` [T] under `logits` [T, C], as the sampler sees them.

    A suppressed token has log-probability minus infinity.
    """
    scaled = scaled_logits(logits, temperature, suppressed)
    chosen = scaled.gather(1, tokens[:, None])[:, 0]
    return chosen - scaled.logsumexp(dim=1)


def hidden_logprobs(
    head: Any,
    hidden: Tensor,
    tokens: Tensor,
    *,
    temperature: float,
    suppressed: Tensor | None,
    chunk_tokens: int,
) -> Tensor:
    """Log-probabilities from hidden states, `chunk_tokens` rows of logits at a time.

    With gradients, each chunk's logits are computed again in the backward, so that no more than
    one chunk of them is ever alive.

    Args:
        head: the output projection, a module from [T, h] to [T, C].
        hidden: [T, h], normed.
        tokens: [T] int64.
        temperature, suppressed: as in `scaled_logits`.
        chunk_tokens: rows at a time.
    Returns: [T] float32, or float64 for float64 hidden states.
    """

    def chunk(part: Tensor, part_tokens: Tensor) -> Tensor:
        return chosen_logprobs(
            head(part), part_tokens, temperature=temperature, suppressed=suppressed
        )

    parts = [
        run_block(chunk, part, part_tokens, checkpointing=True)
        for part, part_tokens in zip(
            hidden.split(chunk_tokens), tokens.split(chunk_tokens), strict=True
        )
    ]
    return torch.cat(parts)
