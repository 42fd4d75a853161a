"""Keys and values of a prefix: inside one process with their graph, or packed in a buffer.

Shapes: L = layers, K = key/value heads, P = prefix tokens, D = head width. A packed buffer is
[L, 2, K, P, D], keys first; keys are turned by their rotary angles already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.vlm.errors import PromptInvalid
from common.vlm.loading import head_dim, text_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Qwen2_5_VLConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixKV:
    """Keys and values of one prefix.

    Attributes:
        keys: L tensors [K, P, D].
        values: L tensors [K, P, D].
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    @property
    def tokens(self) -> int:
        """P."""
        return self.keys[0].shape[1]

    def pack(self, out: Tensor) -> None:
        """Copy all keys and values into a buffer; no gradient follows.

        Args:
            out: [L, 2, K, P, D]; written, cast to its dtype.
        Raises: PromptInvalid if the buffer has another shape.
        """
        expected = (len(self.keys), 2, *self.keys[0].shape)
        if tuple(out.shape) != expected:
            raise PromptInvalid(f"buffer for prefix K/V is {tuple(out.shape)}, not {expected}")
        with torch.no_grad():
            for layer, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
                out[layer, 0].copy_(key)
                out[layer, 1].copy_(value)

    @classmethod
    def unpack(cls, buffer: Tensor) -> PrefixKV:
        """The keys and values in a packed buffer, as views of it."""
        return cls(keys=buffer[:, 0].unbind(0), values=buffer[:, 1].unbind(0))

    @classmethod
    def leaves(cls, buffer: Tensor, gradient: Tensor) -> PrefixKV:
        """Views of a packed buffer whose gradients add up in another buffer.

        A response backward leaves dK and dV of the whole group in `gradient`, ready to be sent.

        Args:
            buffer: [L, 2, K, P, D]; read only.
            gradient: same shape, floating; the caller has zeroed it.
        """
        views = cls.unpack(buffer.detach())
        gradients = cls.unpack(gradient)
        return cls(
            keys=[_leaf(k, g) for k, g in zip(views.keys, gradients.keys, strict=True)],
            values=[_leaf(v, g) for v, g in zip(views.values, gradients.values, strict=True)],
        )


def packed_shape(
    config: Qwen2_5_VLConfig, prefix_tokens: int, *, kv_heads: int | None = None
) -> tuple[int, int, int, int, int]:
    """[L, 2, K, P, D] of a prefix of this model.

    Args:
        config: of the whole model.
        prefix_tokens: P.
        kv_heads: K of a tensor-parallel rank, from `SplitModel.kv_heads`; all if not given.
    """
    text = text_config(config)
    return (
        text.num_hidden_layers,
        2,
        text.num_key_value_heads if kv_heads is None else kv_heads,
        prefix_tokens,
        head_dim(config),
    )


def prefix_backward(prefix: PrefixKV, gradient: Tensor) -> None:
    """Run the backward of a prefix from the gradients of its keys and values.

    Adds to the parameters' accumulators and frees the graph. A prefix that nothing trainable
    precedes has no graph, which is no error.

    Args:
        prefix: from `SplitModel.prefix_kv`, with its graph.
        gradient: [L, 2, K, P, D], summed over the group's responses.
    """
    incoming = PrefixKV.unpack(gradient)
    pairs = [
        (states, grad.to(states.dtype))
        for outputs, grads in ((prefix.keys, incoming.keys), (prefix.values, incoming.values))
        for states, grad in zip(outputs, grads, strict=True)
        if states.requires_grad
    ]
    if pairs:
        torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])


def _leaf(states: Tensor, gradient: Tensor) -> Tensor:
    leaf = states.detach().requires_grad_()
    leaf.grad_dtype = gradient.dtype
    leaf.grad = gradient
    return leaf
