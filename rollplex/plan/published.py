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
}
"""By the name that `rollplex plan --model` takes."""
