"""A model with flat storage of its own, outside any broker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.vlm.loading import empty_model, weight_layout
from common.vlm.tiny import random_init
from common.weights.binding import bind_parameters

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from common.weights.layout import WeightLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundModel:
    """A model, its flat storage and the layout between them.

    Attributes:
        model: the library's model, bound.
        layout: its weights' places.
        weights: [total_elements].
        gradients: [trainable_elements].
    """

    model: Qwen2_5_VLForConditionalGeneration
    layout: WeightLayout
    weights: Tensor
    gradients: Tensor


def bound_model(
    config: Qwen2_5_VLConfig,
    *,
    dtype: torch.dtype,
    train_vision: bool,
    gradient_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    std: float = 0.1,
) -> BoundModel:
    """A model of random weights, biases and norms included, with storage of its own.

    Args:
        config: of the model.
        dtype: of weights.
        train_vision: whether the tower gets gradients.
        gradient_dtype: of the accumulator; the weights' if not given.
        device: of everything.
        seed: of the weights; equal values whatever dtype and `train_vision`.
        std: of matrices.
    """
    model = empty_model(config, device=device, dtype=dtype)
    layout = weight_layout(model, train_vision=train_vision, dtype=dtype)
    weights = torch.zeros(layout.total_elements, dtype=dtype, device=device)
    gradients = torch.zeros(layout.trainable_elements, dtype=gradient_dtype or dtype, device=device)
    random_init(weights, layout, seed=seed, std=std, jitter=0.1)
    bind_parameters(model, layout, weights, gradients)
    return BoundModel(model=model, layout=layout, weights=weights, gradients=gradients)
