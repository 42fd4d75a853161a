"""Between values of responses and values of their packed tokens, by generated lengths alone.

Shapes: T tokens of a packed row, G responses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.rl.errors import ShapeError


def check_lengths(lengths_G: Tensor, tokens: int) -> None:
    """Raise ShapeError unless the lengths are not negative and sum to `tokens`."""
    total = int(lengths_G.sum())
    if total != tokens or bool((lengths_G < 0).any()):
        raise ShapeError(
            f"response lengths {lengths_G.tolist()} sum to {total}, the packed row has {tokens} "
            "tokens: they must agree, and no length may be negative"
        )


def spread(values_G: Tensor, lengths_G: Tensor) -> Tensor:
    """Repeat each response's value for each of its tokens: [G] to [T]."""
    return torch.repeat_interleave(values_G, lengths_G)


def response_index(lengths_G: Tensor) -> Tensor:
    """Index of the response of every token: [T] int64."""
    return spread(torch.arange(lengths_G.numel(), device=lengths_G.device), lengths_G)


def sum_per_response(values_T: Tensor, lengths_G: Tensor) -> Tensor:
    """Sum the token values of each response: [T] to [G]; 0 for an empty response.

    Raises: ShapeError if the lengths do not sum to T.
    """
    check_lengths(lengths_G, values_T.numel())
    sums_G = torch.zeros(lengths_G.numel(), dtype=values_T.dtype, device=values_T.device)
    return sums_G.index_add(0, response_index(lengths_G), values_T)
