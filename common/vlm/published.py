"""Configurations of published models, as the values of their ``config.json``."""

from __future__ import annotations

from typing import Any


def _qwen2_5_vl(
    *,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab_size: int,
    vision_intermediate_size: int,
    tied: bool = False,
) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": tied,
        "text_config": {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab_size,
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": vision_intermediate_size,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden_size,
        },
    }


def _qwen3_vl(
    *,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    tower: dict[str, Any],
    tied: bool = False,
) -> dict[str, Any]:
    return {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": tied,
        "text_config": {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        },
        "vision_config": {
            **tower,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "out_hidden_size": hidden_size,
        },
    }


_SMALL_TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}
_LARGE_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "deepstack_visual_indexes": [8, 16, 24],
}
"""Towers of Qwen3-VL: of the models up to 4B, and of the larger ones."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-3b": _qwen2_5_vl(
        hidden_size=2048,
        intermediate_size=11008,
        layers=36,
        heads=16,
        kv_heads=2,
        vocab_size=151936,
        vision_intermediate_size=3420,
        tied=True,
    ),
    "qwen2.5-vl-7b": _qwen2_5_vl(
        hidden_size=3584,
        intermediate_size=18944,
        layers=28,
        heads=28,
        kv_heads=4,
        vocab_size=152064,
        vision_intermediate_size=3420,
    ),
    "qwen2.5-vl-32b": _qwen2_5_vl(
        hidden_size=5120,
        intermediate_size=27648,
        layers=64,
        heads=40,
        kv_heads=8,
        vocab_size=152064,
        vision_intermediate_size=3456,
    ),
    "qwen2.5-vl-72b": _qwen2_5_vl(
        hidden_size=8192,
        intermediate_size=29568,
        layers=80,
        heads=64,
        kv_heads=8,
        vocab_size=152064,
        vision_intermediate_size=3456,
    ),
    "qwen3-vl-2b": _qwen3_vl(
        hidden_size=2048,
        intermediate_size=6144,
        layers=28,
        heads=16,
        tower=_SMALL_TOWER,
        tied=True,
    ),
    "qwen3-vl-4b": _qwen3_vl(
        hidden_size=2560,
        intermediate_size=9728,
        layers=36,
        heads=32,
        tower=_SMALL_TOWER,
        tied=True,
    ),
    "qwen3-vl-8b": _qwen3_vl(
        hidden_size=4096,
        intermediate_size=12288,
        layers=36,
        heads=32,
        tower=_LARGE_TOWER,
    ),
    "qwen3-vl-32b": _qwen3_vl(
        hidden_size=5120,
        intermediate_size=25600,
        layers=64,
        heads=64,
        tower=_LARGE_TOWER,
    ),
}
"""By the name that ``--model`` takes."""
