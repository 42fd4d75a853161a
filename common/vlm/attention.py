"""How the split pass attends: the seam where faster kernels take the place of plain SDPA.

Shapes: P = prefix tokens, T = tokens of all responses of a group in one row, S = P + T,
H = query heads, K = key/value heads, D = head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


class AttentionBackend(Protocol):
    """Causal attention over a prefix, and of packed responses over prefix and themselves."""

    def prefix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of the prefix over itself.

        Args:
            query: [H, P, D]; key and value: [K, P, D].
        Returns: [H, P, D]; differentiable.
        """

    def plan(self, prefix_tokens: int, lengths_G: Sequence[int], device: torch.device) -> Any:
        """What `responses` needs to know about one packed row; made once, used in every layer."""

    def responses(
        self,
        query: Tensor,
        prefix: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        plan: Any,
    ) -> Tensor:
        """Each response's tokens attend to the whole prefix and to themselves, causally.

        Args:
            query: [H, T, D].
            prefix: key and value [K, P, D], shared by all responses.
            own: key and value [K, T, D].
            plan: from `plan` with the same lengths.
        Returns: [H, T, D]; differentiable in all tensors.
        """


class SdpaAttention:
    """Torch's scaled dot product attention with a boolean mask; runs everywhere."""

    def prefix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionBackend.prefix`."""
        return F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, enable_gqa=True
        )[0]

    def plan(self, prefix_tokens: int, lengths_G: Sequence[int], device: torch.device) -> Tensor:
        """[T, S] bool: which keys, prefix first, each response token sees."""
        response_T, index_T = packed_indices(lengths_G, device)
        same = response_T[:, None] == response_T[None, :]
        own = same & (index_T[None, :] <= index_T[:, None])
        return F.pad(own, (prefix_tokens, 0), value=True)

    def responses(
        self,
        query: Tensor,
        prefix: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        plan: Tensor,
    ) -> Tensor:
        """See `AttentionBackend.responses`."""
        key = torch.cat((prefix[0], own[0]), dim=1)
        value = torch.cat((prefix[1], own[1]), dim=1)
        return F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=plan, enable_gqa=True
        )[0]


def packed_indices(lengths_G: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Which response each token of a packed row belongs to, and its index in that response.

    Returns: two [T] int64 tensors.
    """
    lengths = torch.tensor(lengths_G, dtype=torch.int64)
    response_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    starts = lengths.cumsum(0) - lengths
    index_T = torch.arange(len(response_T)) - starts[response_T]
    return response_T.to(device), index_T.to(device)
