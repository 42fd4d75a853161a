"""Configurations and weightless models of Qwen2.5-VL, and the layouts of their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from common.vlm.errors import ModelFilesError, UnsupportedModel
from common.vlm.files import CONFIG_FILE, model_folder, read_json
from common.vlm.names import VISUAL
from common.weights.layout import TensorSpec, WeightLayout

if TYPE_CHECKING:
    from pathlib import Path

MODEL_TYPES = ("qwen2_5_vl",)
"""Values of ``model_type`` that the split pass implements."""

STATIC_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""Rotary types whose frequencies do not depend on how long a sequence is."""


def load_config(path: str | Path) -> Qwen2_5_VLConfig:
    """The configuration in a model folder.

    Raises: ModelFilesError for an absent folder or file, UnsupportedModel for a model type or a
        setting that the split pass does not implement.
    """
    folder = model_folder(path)
    model_type = read_json(folder / CONFIG_FILE).get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedModel(
            f"{folder / CONFIG_FILE}: model_type is {model_type!r}; legal are "
            f"{', '.join(MODEL_TYPES)}",
            model_type=model_type,
        )
    try:
        config = Qwen2_5_VLConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ModelFilesError(
            f"{folder / CONFIG_FILE} is no Qwen2.5-VL configuration: {error}",
            path=str(folder / CONFIG_FILE),
        ) from error
    check_config(config)
    return config


def check_config(config: Qwen2_5_VLConfig) -> None:
    """Refuse settings under which the split pass would not be the model.

    Raises: UnsupportedModel naming the key, its value and what is legal.
    """
    text = text_config(config)
    rope_type = text.rope_parameters.get("rope_type", "default")
    if rope_type not in STATIC_ROPE_TYPES:
        raise UnsupportedModel(
            f"text_config.rope_parameters.rope_type is {rope_type!r}; legal are "
            f"{', '.join(STATIC_ROPE_TYPES)}: others change positions with the sequence's length"
        )
    if any(kind != "full_attention" for kind in text.layer_types):
        raise UnsupportedModel(
            "text_config.layer_types has sliding attention; only full_attention is legal"
        )
    if text.attention_dropout:
        raise UnsupportedModel(
            f"text_config.attention_dropout is {text.attention_dropout}; only 0.0 is legal"
        )


def empty_model(
    config: Qwen2_5_VLConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype
) -> Qwen2_5_VLForConditionalGeneration:
    """The model with parameters on the meta device and buffers on `device`.

    Its parameters get their storage from `common.weights.binding.bind_parameters`.

    Args:
        config: left unchanged.
        device: where the rotary frequencies, which no checkpoint holds, are computed.
        dtype: of the parameters.
    Raises: UnsupportedModel as `check_config` does.
    """
    check_config(config)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration._from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    for owner in (model.model.visual, model.model.language_model):
        for name, rotary in list(owner.named_children()):
            if hasattr(rotary, "inv_freq"):
                with torch.device(device):
                    setattr(owner, name, type(rotary)(config=rotary.config))
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if left:
        raise UnsupportedModel(f"buffers that no rule materialises: {', '.join(left)}")
    return model.eval()


def weight_layout(
    model: Qwen2_5_VLForConditionalGeneration, *, train_vision: bool, dtype: torch.dtype
) -> WeightLayout:
    """Places for all of the model's parameters, whole tensors on one rank.

    Norms and biases have no weight decay. The vision tower, its merger included, is frozen unless
    `train_vision`. A tied output head is an alias of the token embeddings.

    Args:
        model: its parameters may be on the meta device.
        train_vision: whether the vision tower and its merger are trained.
        dtype: of the compute weights.
    """
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}
    specs: list[TensorSpec] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (first := first_names.setdefault(id(parameter), name)) != name:
            aliases[name] = first
            continue
        trainable = train_vision or not name.startswith(VISUAL)
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(parameter.shape),
                trainable=trainable,
                decay=trainable and parameter.dim() > 1,
            )
        )
    return WeightLayout.build(specs, dtype=str(dtype).removeprefix("torch."), aliases=aliases)


def suppressed_token_ids(config: Qwen2_5_VLConfig) -> tuple[int, ...]:
    """Token ids that may never be sampled: a placeholder without features breaks re-scoring.

    Samplers set these to minus infinity, and so does the scorers' log-softmax.
    """
    return tuple(sorted({config.image_token_id, config.video_token_id}))


def text_config(config: Qwen2_5_VLConfig) -> Any:
    """The text model's part, which the library types as one of three things."""
    return config.text_config


def vision_config(config: Qwen2_5_VLConfig) -> Any:
    """The vision tower's part, likewise."""
    return config.vision_config


def head_dim(config: Qwen2_5_VLConfig) -> int:
    """Width of one attention head of the text model."""
    text = text_config(config)
    return int(text.hidden_size // text.num_attention_heads)
