"""Models of known shape with random weights, made on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import Qwen2_5_VLConfig

from common.vlm.loading import empty_model, weight_layout
from common.vlm.prompt import PromptTensors, prepare_prompt
from common.vlm.tiny import tiny_config
from common.weights.binding import bind_parameters, views

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Qwen2_5_VLForConditionalGeneration

    from common.weights.layout import WeightLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One shape of model and group.

    Attributes:
        config: of the model.
        prefix_tokens: P.
        responses: G.
        response_tokens: R of each response.
        image_grid: patches of one image, (frames, height, width).
        product_size: of the ceiling's matrix product.
    """

    config: Qwen2_5_VLConfig
    prefix_tokens: int
    responses: int
    response_tokens: int
    image_grid: tuple[int, int, int]
    product_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """A bound model with its accumulator.

    Attributes:
        gradients: [trainable_elements] float32.
    """

    model: Qwen2_5_VLForConditionalGeneration
    layout: WeightLayout
    weights: Tensor
    gradients: Tensor


def qwen_3b() -> Qwen2_5_VLConfig:
    """Qwen2.5-VL-3B."""
    return Qwen2_5_VLConfig(
        text_config={
            "model_type": "qwen2_5_vl_text",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "mrope_section": [16, 24, 24],
            },
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "tie_word_embeddings": True,
        },
        vision_config={
            "model_type": "qwen2_5_vl_vision",
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "out_hidden_size": 2048,
            "tokens_per_second": 2,
        },
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        tie_word_embeddings=True,
    )


def workload(shape: str) -> Workload:
    """The workload of a named shape: ``3b`` or ``tiny``."""
    if shape == "3b":
        return Workload(
            config=qwen_3b(),
            prefix_tokens=6144,
            responses=8,
            response_tokens=256,
            image_grid=(1, 128, 192),
            product_size=8192,
        )
    return Workload(
        config=tiny_config(vocab_size=300),
        prefix_tokens=40,
        responses=3,
        response_tokens=5,
        image_grid=(1, 8, 12),
        product_size=128,
    )


def random_model(
    config: Qwen2_5_VLConfig, *, device: torch.device, dtype: torch.dtype, train_vision: bool
) -> RandomModel:
    """Weights of standard deviation 0.02, norms at 1, small biases; made on the device."""
    torch.manual_seed(0)
    model = empty_model(config, device=device, dtype=dtype)
    layout = weight_layout(model, train_vision=train_vision, dtype=dtype)
    weights = torch.empty(layout.total_elements, device=device, dtype=dtype).normal_(0, 0.02)
    for name, view in views(weights, layout).items():
        if view.dim() == 1 and not name.endswith(".bias"):
            view.fill_(1.0)
    gradients = torch.zeros(layout.trainable_elements, device=device, dtype=torch.float32)
    bind_parameters(model, layout, weights, gradients)
    return RandomModel(model=model, layout=layout, weights=weights, gradients=gradients)


def text_prompt(
    config: Qwen2_5_VLConfig, prefix_tokens: int, device: torch.device
) -> PromptTensors:
    """A prompt of random text, one token longer than its prefix."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(8, 200, (prefix_tokens + 1,), generator=generator)
    return prepare_prompt(config, token_ids=ids).to(device)
