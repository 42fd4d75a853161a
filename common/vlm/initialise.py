"""Makes a small Qwen2.5-VL with random weights and a tokenizer of its own, from a TOML file.

The result is an ordinary model folder in the Hugging Face format: configuration, safetensors shards
with their index, tokenizer, chat template, image processor and generation settings.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from common.config.base import FrozenConfig
from common.config.loading import load_config
from common.data.resolve import resolve_function
from common.data.tokenizer import (
    END_OF_TEXT,
    IMAGE_PAD,
    TURN_END,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    train_tokenizer,
)
from common.errors import AlreadyExists, InvalidArgument
from common.vlm.checkpoint import ARCHITECTURE
from common.vlm.loading import empty_model

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


class TextSpec(FrozenConfig):
    """The language model."""

    hidden: int = Field(default=64, gt=0)
    """Width of the residual stream; a multiple of ``heads``."""
    layers: int = Field(default=2, gt=0)
    """Decoder layers."""
    heads: int = Field(default=4, gt=0)
    """Query heads."""
    kv_heads: int = Field(default=2, gt=0)
    """Key and value heads; divides ``heads``."""
    intermediate: int = Field(default=128, gt=0)
    """Inner width of the MLP."""
    max_positions: int = Field(default=4096, gt=0)
    """Longest sequence that the configuration declares."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary frequencies."""
    tied_embeddings: bool = True
    """Whether the output projection is the embedding matrix."""

    @model_validator(mode="after")
    def _divides(self) -> TextSpec:
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(
                f"hidden ({self.hidden}) over heads ({self.heads}) must be an even whole number"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        if self.hidden // self.heads < 8:
            raise ValueError("a head needs 8 dimensions or more for its three rotary sections")
        return self


class VisionSpec(FrozenConfig):
    """The vision tower and what its image processor does."""

    depth: int = Field(default=2, gt=0)
    """Blocks."""
    hidden: int = Field(default=64, gt=0)
    """Width; over ``heads`` a multiple of 4."""
    heads: int = Field(default=4, gt=0)
    """Attention heads."""
    intermediate: int = Field(default=128, gt=0)
    """Inner width of the MLP."""
    full_attention_blocks: tuple[int, ...] = (1,)
    """Blocks that attend to the whole frame; the others attend within windows."""
    window: int = Field(default=56, gt=0)
    """Edge of an attention window in pixels; a multiple of patch times merge."""
    patch: int = Field(default=14, gt=0)
    """Edge of a patch in pixels."""
    merge: int = Field(default=2, gt=0)
    """Patches a side that become one token."""
    temporal_patch: int = Field(default=2, gt=0)
    """Video frames that become one token."""
    tokens_per_second: int = Field(default=4, gt=0)
    """Temporal positions a second of video."""
    min_pixels: int = Field(default=56 * 56, gt=0)
    """Smaller images are enlarged to about this many pixels."""
    max_pixels: int = Field(default=112 * 112, gt=0)
    """Larger images are reduced to about this many pixels."""

    @model_validator(mode="after")
    def _consistent(self) -> VisionSpec:
        unit = self.patch * self.merge
        if self.hidden % self.heads or (self.hidden // self.heads) % 4:
            raise ValueError(
                f"hidden ({self.hidden}) over heads ({self.heads}) must be a multiple of 4"
            )
        if self.window % unit:
            raise ValueError(f"window ({self.window}) must be a multiple of patch x merge ({unit})")
        if not all(0 <= block < self.depth for block in self.full_attention_blocks):
            raise ValueError(
                f"full_attention_blocks {self.full_attention_blocks} must lie in"
                f" 0..{self.depth - 1}"
            )
        if not unit * unit <= self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"{unit * unit} <= min_pixels ({self.min_pixels}) <= max_pixels"
                f" ({self.max_pixels}) must hold"
            )
        return self


class TokenizerSpec(FrozenConfig):
    """The tokenizer."""

    texts: str | tuple[str, ...]
    """Training texts, or ``module:function`` that returns them."""
    vocab_tokens: int = Field(default=384, gt=0)
    """Upper limit of the vocabulary, 256 bytes and 7 special tokens included."""
    fill_to_tokens: int | None = Field(default=None, gt=0)
    """Add tokens that no text leads to until there are this many, so that the model's vocabulary
    is as large as a real one; unset: none."""


class ModelSpec(FrozenConfig):
    """A small model to make."""

    seed: int = Field(default=0, ge=0)
    """Seed of the weights."""
    embedding_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the token embeddings; linear layers use 1 / sqrt(fan-in)."""
    shards: int = Field(default=2, ge=2)
    """At least this many safetensors files are written."""
    text: TextSpec = TextSpec()
    vision: VisionSpec = VisionSpec()
    tokenizer: TokenizerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class InitReport:
    """What ``initialise`` wrote."""

    path: Path
    parameters: int
    vocab_tokens: int
    files: tuple[str, ...]


def load_spec(path: Path, *, sets: Sequence[str] = ()) -> ModelSpec:
    """Read a model specification, with ``a.b=value`` items on top of the file.

    Raises: ConfigError naming each wrong key, its value and what is legal.
    """
    return load_config(ModelSpec, path, sets=sets)


def initialise(spec: ModelSpec, target: Path, *, weights: bool = True) -> InitReport:
    """Write the model folder ``target``; it appears complete or not at all.

    Equal specifications give equal bytes of weights, whatever the state of the process.

    Args:
        weights: False: everything but safetensors, for runs with random weights.
    Raises: AlreadyExists if ``target`` exists and is not an empty folder.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise AlreadyExists(
            f"{target} exists and is not an empty folder; choose another or remove it",
            path=str(target),
        )
    tokenizer = train_tokenizer(
        _texts(spec.tokenizer),
        vocab_tokens=spec.tokenizer.vocab_tokens,
        fill_to_tokens=spec.tokenizer.fill_to_tokens,
    )
    config = build_config(spec, tokenizer)
    model = build_model(spec, config) if weights else empty_model(config, dtype=torch.float32)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        _write(staging, spec, config, model if weights else None, tokenizer)
        staging.chmod(0o755)
        os.replace(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return InitReport(
        path=target,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocab_tokens=len(tokenizer),
        files=tuple(sorted(entry.name for entry in target.iterdir())),
    )


def build_config(spec: ModelSpec, tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """The Hugging Face configuration of ``spec`` for this tokenizer's vocabulary."""
    text, vision = spec.text, spec.vision
    ids: dict[str, Any] = {
        token: tokenizer.convert_tokens_to_ids(token)
        for token in (END_OF_TEXT, TURN_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
    }
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": text.hidden,
            "intermediate_size": text.intermediate,
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "num_key_value_heads": text.kv_heads,
            "max_position_embeddings": text.max_positions,
            "max_window_layers": text.layers,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": text.rope_theta,
                "mrope_section": list(rotary_sections(text.hidden // text.heads)),
            },
            "tie_word_embeddings": text.tied_embeddings,
            "bos_token_id": ids[END_OF_TEXT],
            "eos_token_id": ids[TURN_END],
            "pad_token_id": ids[END_OF_TEXT],
        },
        vision_config={
            "depth": vision.depth,
            "hidden_size": vision.hidden,
            "intermediate_size": vision.intermediate,
            "num_heads": vision.heads,
            "out_hidden_size": text.hidden,
            "fullatt_block_indexes": list(vision.full_attention_blocks),
            "window_size": vision.window,
            "patch_size": vision.patch,
            "spatial_merge_size": vision.merge,
            "temporal_patch_size": vision.temporal_patch,
            "tokens_per_second": vision.tokens_per_second,
        },
        image_token_id=ids[IMAGE_PAD],
        video_token_id=ids[VIDEO_PAD],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=text.tied_embeddings,
    )


def rotary_sections(head_dim: int) -> tuple[int, int, int]:
    """Split half a head into temporal, height and width frequencies, about 2 : 3 : 3."""
    half = head_dim // 2
    side = half * 3 // 8
    return half - 2 * side, side, side


def build_model(spec: ModelSpec, config: Qwen2_5_VLConfig) -> Qwen2_5_VLForConditionalGeneration:
    """A float32 model on the CPU with weights that depend on the specification only."""
    with torch.random.fork_rng(devices=[]):
        model = Qwen2_5_VLForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(spec.seed)
    linear_or_conv = (nn.Linear, nn.Conv3d)
    with torch.no_grad():
        for _, module in sorted(model.named_modules()):
            if isinstance(module, nn.Embedding):
                module.weight.normal_(0.0, spec.embedding_std, generator=generator)
            elif isinstance(module, linear_or_conv):
                std = 1.0 / math.sqrt(module.weight[0].numel())
                if module is model.lm_head:
                    std = spec.embedding_std
                module.weight.normal_(0.0, std, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
            else:
                _reset_norm(module)
    return model


def _reset_norm(module: nn.Module) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        parameter.fill_(0.0 if name == "bias" else 1.0)


def _texts(spec: TokenizerSpec) -> Sequence[str]:
    if not isinstance(spec.texts, str):
        return spec.texts
    texts = resolve_function(spec.texts, key="tokenizer.texts")()
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument(
            f"tokenizer.texts = {spec.texts!r} must return a sequence of strings",
            key="tokenizer.texts",
        )
    return texts


def _write(
    folder: Path,
    spec: ModelSpec,
    config: Qwen2_5_VLConfig,
    model: Qwen2_5_VLForConditionalGeneration | None,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text: Any = config.text_config
    generation = GenerationConfig(
        bos_token_id=text.bos_token_id,
        eos_token_id=[text.eos_token_id, text.bos_token_id],
        pad_token_id=text.pad_token_id,
        do_sample=True,
    )
    if model is None:
        config.architectures = [ARCHITECTURE]
        config.save_pretrained(folder)
        generation.save_pretrained(folder)
    else:
        size_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        model.generation_config = generation
        model.save_pretrained(folder, max_shard_size=size_bytes // spec.shards)
    tokenizer.save_pretrained(folder)
    processor = json.dumps(image_processor_settings(spec.vision), indent=2)
    (folder / "preprocessor_config.json").write_text(processor + "\n")


def image_processor_settings(vision: VisionSpec) -> dict[str, Any]:
    """Contents of ``preprocessor_config.json``."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": vision.patch,
        "merge_size": vision.merge,
        "temporal_patch_size": vision.temporal_patch,
        "min_pixels": vision.min_pixels,
        "max_pixels": vision.max_pixels,
        "size": {"shortest_edge": vision.min_pixels, "longest_edge": vision.max_pixels},
        "image_mean": list(_MEAN),
        "image_std": list(_STD),
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
    }
