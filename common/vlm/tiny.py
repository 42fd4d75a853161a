"""A small Qwen2.5-VL for tests and verification: configuration, weights, prompts."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig

from common.vlm.loading import text_config, vision_config
from common.vlm.prompt import PromptTensors, prepare_prompt
from common.weights.binding import views

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.weights.layout import WeightLayout

VISION_START_ID = 1
VISION_END_ID = 2
IMAGE_TOKEN_ID = 3
VIDEO_TOKEN_ID = 4
FIRST_TEXT_ID = 8
"""Ids from here on are plain text in `tiny_config`'s vocabulary."""


def tiny_config(
    *,
    vocab_size: int = 200,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vision_hidden_size: int = 32,
    vision_heads: int = 2,
    patch_size: int = 14,
    tie_word_embeddings: bool = False,
) -> Qwen2_5_VLConfig:
    """A configuration with every feature of the real one: GQA, M-RoPE, window attention.

    The vision tower has two blocks; the first attends in windows of 2 x 2 merged patches.
    """
    half_head = hidden_size // heads // 2
    temporal = half_head // 4
    height = (half_head - temporal) // 2
    return Qwen2_5_VLConfig(
        text_config={
            "model_type": "qwen2_5_vl_text",
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [temporal, height, half_head - temporal - height],
            },
            "bos_token_id": None,
            "eos_token_id": 0,
            "tie_word_embeddings": tie_word_embeddings,
        },
        vision_config={
            "model_type": "qwen2_5_vl_vision",
            "depth": 2,
            "hidden_size": vision_hidden_size,
            "intermediate_size": 2 * vision_hidden_size,
            "num_heads": vision_heads,
            "patch_size": patch_size,
            "window_size": 4 * patch_size,
            "fullatt_block_indexes": [1],
            "out_hidden_size": hidden_size,
            "tokens_per_second": 2,
        },
        image_token_id=IMAGE_TOKEN_ID,
        video_token_id=VIDEO_TOKEN_ID,
        vision_start_token_id=VISION_START_ID,
        vision_end_token_id=VISION_END_ID,
        tie_word_embeddings=tie_word_embeddings,
    )


def random_init(
    flat: Tensor, layout: WeightLayout, *, seed: int, std: float = 0.02, jitter: float = 0.0
) -> None:
    """Fill flat weights with random values that depend on seed and name alone.

    So a layout with a frozen tower, another dtype or another device gets the same values.

    Args:
        flat: [total_elements]; written.
        layout: names and places.
        seed: any integer.
        std: of matrices and embeddings.
        jitter: standard deviation of biases around 0 and of norms around 1.
    """
    flat.zero_()
    for name, view in views(flat, layout).items():
        digest = hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
        values = torch.randn(view.shape, generator=generator)
        if view.dim() > 1:
            values *= std
        elif name.endswith(".bias"):
            values *= jitter
        else:
            values.mul_(jitter).add_(1.0)
        view.copy_(values)


def tiny_prompt(
    config: Qwen2_5_VLConfig,
    *,
    text_tokens: int = 5,
    images: Sequence[tuple[int, int, int]] = (),
    videos: Sequence[tuple[int, int, int]] = (),
    seconds_per_grid: float = 1.0,
    seed: int = 0,
) -> PromptTensors:
    """A prompt of random text and pixels: text, images, videos, text.

    Args:
        config: from `tiny_config`.
        text_tokens: at the end, at least 1; as many again come first if there is any vision.
        images: grids (1, height, width) in patches.
        videos: grids (frames, height, width) in patches.
        seconds_per_grid: time between two temporal patches of every video.
        seed: of text and pixels.
    """
    generator = torch.Generator().manual_seed(seed)
    vision = vision_config(config)
    merged = vision.spatial_merge_size**2

    def text() -> list[int]:
        vocab = text_config(config).vocab_size
        ids = torch.randint(FIRST_TEXT_ID, vocab, (text_tokens,), generator=generator)
        return [int(i) for i in ids]

    ids = text() if images or videos else []
    for grids, token in ((images, IMAGE_TOKEN_ID), (videos, VIDEO_TOKEN_ID)):
        for frames, height, width in grids:
            placeholders = [token] * (frames * height * width // merged)
            ids += [VISION_START_ID, *placeholders, VISION_END_ID]
    ids += text()
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def pixels(grids: Sequence[tuple[int, int, int]]) -> Tensor:
        patches = sum(t * h * w for t, h, w in grids)
        return torch.randn((patches, width), generator=generator)

    return prepare_prompt(
        config,
        token_ids=torch.tensor(ids),
        pixel_values=pixels(images),
        image_grid_thw=torch.tensor(list(images), dtype=torch.int64).reshape(-1, 3),
        pixel_values_videos=pixels(videos),
        video_grid_thw=torch.tensor(list(videos), dtype=torch.int64).reshape(-1, 3),
        second_per_grid_ts=torch.full((len(videos),), seconds_per_grid),
    )
