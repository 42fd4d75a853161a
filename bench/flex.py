"""The baseline of the packed response pass: one compiled FlexAttention over concatenated keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from common.vlm.attention import SdpaAttention, packed_indices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class FlexConcatenated(SdpaAttention):
    """Implements `common.vlm.attention.AttentionBackend`."""

    def __init__(self) -> None:
        self._compiled = torch.compile(flex_attention, dynamic=False)

    def plan(self, prefix_tokens: int, lengths_G: Sequence[int], device: torch.device) -> Any:
        """A block mask: the prefix, and the own response up to oneself."""
        response_T, _ = packed_indices(lengths_G, device)
        total = len(response_T)

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            del batch, head
            own = key - prefix_tokens
            same = response_T[query] == response_T[own.clamp(min=0)]
            return (own < 0) | (same & (own <= query))

        return create_block_mask(
            visible, None, None, total, prefix_tokens + total, device=device, _compile=True
        )

    def responses(
        self, query: Tensor, prefix: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], plan: Any
    ) -> Tensor:
        """See `AttentionBackend.responses`."""
        key = torch.cat((prefix[0], own[0]), dim=1)
        value = torch.cat((prefix[1], own[1]), dim=1)
        return self._compiled(
            query[None], key[None], value[None], block_mask=plan, enable_gqa=True
        )[0]
