"""The steps between attentions: the seam where fused kernels take the place of plain modules.

Shapes: S = tokens, h = hidden width, H = query heads, K = key/value heads, D = head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from common.vlm import layers
from common.vlm.logprobs import hidden_logprobs
from common.vlm.vision import PlainBlocks

if TYPE_CHECKING:
    from torch import Tensor

    from common.vlm.parallel.group import RankGroup
    from common.vlm.vision import VisionBlocks


class LayerSteps(Protocol):
    """What the split pass does around attention; all differentiable.

    Attributes:
        vision: the same for the vision tower.
        group: ranks that the model is split over, if the steps themselves sum over them; None for
            one rank, or if its modules do.
    """

    vision: VisionBlocks
    group: RankGroup | None

    def embed(self, embedding: Any, ids: Tensor) -> Tensor:
        """[S, h] embeddings of ids [S]."""

    def norm(self, norm: Any, hidden: Tensor) -> Tensor:
        """[S, h] normed hidden states."""

    def query_key_value(
        self, layer: Any, hidden: Tensor, angles: layers.Rotary
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Turned queries [H, S, D], turned keys and values [K, S, D] of hidden states [S, h]."""

    def key_value(self, layer: Any, hidden: Tensor, angles: layers.Rotary) -> tuple[Tensor, Tensor]:
        """Turned keys and values only."""

    def finish(self, layer: Any, hidden: Tensor, attended: Tensor) -> Tensor:
        """[S, h]: output projection, residual and MLP, of what entered the layer and [H, S, D]."""

    def logits(self, head: Any, hidden: Tensor) -> Tensor:
        """[S, C] over the whole vocabulary, of normed hidden states [S, h]; no gradient follows."""

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
        """See `hidden_logprobs`."""


class PlainSteps:
    """The library's modules; runs everywhere, in every dtype."""

    def __init__(self) -> None:
        self.vision: VisionBlocks = PlainBlocks()
        self.group: RankGroup | None = None

    def embed(self, embedding: Any, ids: Tensor) -> Tensor:
        """See `LayerSteps.embed`."""
        return embedding(ids)

    def norm(self, norm: Any, hidden: Tensor) -> Tensor:
        """See `LayerSteps.norm`."""
        return norm(hidden)

    def query_key_value(
        self, layer: Any, hidden: Tensor, angles: layers.Rotary
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `LayerSteps.query_key_value`."""
        normed = layer.input_layernorm(hidden)
        key, value = layers.key_value(layer, normed, angles)
        return layers.queries(layer, normed, angles), key, value

    def key_value(self, layer: Any, hidden: Tensor, angles: layers.Rotary) -> tuple[Tensor, Tensor]:
        """See `LayerSteps.key_value`."""
        return layers.key_value(layer, layer.input_layernorm(hidden), angles)

    def finish(self, layer: Any, hidden: Tensor, attended: Tensor) -> Tensor:
        """See `LayerSteps.finish`."""
        return layers.finish(layer, hidden, attended)

    def logits(self, head: Any, hidden: Tensor) -> Tensor:
        """See `LayerSteps.logits`."""
        return head(hidden)

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
        """See `LayerSteps.logprobs`."""
        return hidden_logprobs(
            head,
            hidden,
            tokens,
            temperature=temperature,
            suppressed=suppressed,
            chunk_tokens=chunk_tokens,
        )
