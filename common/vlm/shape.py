"""The numbers of a model that decide how many bytes its tensors have. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import InvalidArgument
from common.vlm.errors import UnsupportedModel
from common.vlm.files import CONFIG_FILE, read_json
from common.vlm.published import PUBLISHED

if TYPE_CHECKING:
    from collections.abc import Mapping

QWEN2_5, QWEN3 = "qwen2_5_vl", "qwen3_vl"
MODEL_TYPES = (QWEN2_5, QWEN3)
"""Values of ``model_type`` that can be planned."""

_VISION_DEFAULTS: dict[str, dict[str, Any]] = {
    QWEN2_5: {"depth": 32, "num_heads": 16, "patch_size": 14},
    QWEN3: {
        "depth": 27,
        "num_heads": 16,
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}
"""What the library takes where a file leaves a key out."""
_VISION_COMMON = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """The vision tower.

    Attributes:
        patch_elements: values of one patch's pixels.
        merged_patches: patches of one vision token.
        deepstack: inner layers whose features go to the text model too.
        positions: rows of a table of position embeddings; 0: there is none.
    """

    depth: int
    width: int
    inner: int
    heads: int
    patch_elements: int
    merged_patches: int
    out_width: int
    deepstack: int
    positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The text model and its tower.

    Attributes:
        name: as it was asked for.
        model_type: one of `MODEL_TYPES`.
        inner: intermediate width of the MLP.
        attention_bias: whether queries, keys and values have one.
        output_bias: whether attention's output projection has one.
        head_norms: whether queries and keys are normed head by head.
        tied: whether the output head is the token embeddings.
    """

    name: str
    model_type: str
    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    attention_bias: bool
    output_bias: bool
    head_norms: bool
    tied: bool
    vision: VisionShape


def read_shape(model: str) -> ModelShape:
    """The shape of a named model, or of the one in a folder.

    Args:
        model: a key of `PUBLISHED`, or a folder with ``config.json``.
    Raises: InvalidArgument if it is neither; ModelFilesError for a folder without a readable
        ``config.json``; UnsupportedModel for another type of model.
    """
    if model in PUBLISHED:
        return shape_of(PUBLISHED[model], name=model)
    folder = Path(model)
    if not folder.is_dir():
        raise InvalidArgument(
            f"model = {model!r}: neither a folder with {CONFIG_FILE} nor a known name; names are "
            f"{', '.join(PUBLISHED)}"
        )
    return shape_of(read_json(folder / CONFIG_FILE), name=model)


def vision_ranks(vision: VisionShape, ranks: int) -> int:
    """Over how many of the ranks the tower is split: all, or 1 where its shape does not divide."""
    divides = vision.heads % ranks == 0 and vision.inner % ranks == 0
    return ranks if divides else 1


def shape_of(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shape that a ``config.json`` describes, its text part nested or flat.

    Raises: UnsupportedModel for another type of model; InvalidArgument naming a key that is
        absent or has a value of another kind, and what is legal.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedModel(
            f"{name}: model_type is {model_type!r}; legal are {', '.join(MODEL_TYPES)}"
        )
    text = _Keys(name, "text_config", _table(config, "text_config", name) or config)
    newer = model_type == QWEN3
    heads, width = text.number("num_attention_heads"), text.number("hidden_size")
    if not newer and width % heads:
        raise InvalidArgument(
            f"{name}: text_config.hidden_size is {width}; legal is a multiple of "
            f"num_attention_heads = {heads}"
        )
    head_width = text.number("head_dim") if newer else width // heads
    bias = bool(text.values.get("attention_bias", False)) if newer else True
    tied = config.get("tie_word_embeddings") or text.values.get("tie_word_embeddings")
    return ModelShape(
        name=name,
        model_type=model_type,
        vocabulary=text.number("vocab_size"),
        width=width,
        inner=text.number("intermediate_size"),
        layers=text.number("num_hidden_layers"),
        heads=heads,
        kv_heads=text.number("num_key_value_heads"),
        head_width=head_width,
        attention_bias=bias,
        output_bias=newer and bias,
        head_norms=newer,
        tied=bool(tied),
        vision=_vision_shape(model_type, name, _table(config, "vision_config", name)),
    )


def _vision_shape(model_type: str, name: str, values: Mapping[str, Any]) -> VisionShape:
    known = {**_VISION_COMMON, **_VISION_DEFAULTS[model_type], **values}
    if "in_chans" in values:
        known["in_channels"] = values["in_chans"]
    vision = _Keys(name, "vision_config", known)
    newer = model_type == QWEN3
    return VisionShape(
        depth=vision.number("depth"),
        width=vision.number("hidden_size"),
        inner=vision.number("intermediate_size"),
        heads=vision.number("num_heads"),
        patch_elements=vision.number("in_channels")
        * vision.number("temporal_patch_size")
        * vision.number("patch_size") ** 2,
        merged_patches=vision.number("spatial_merge_size") ** 2,
        out_width=vision.number("out_hidden_size"),
        deepstack=vision.length("deepstack_visual_indexes") if newer else 0,
        positions=vision.number("num_position_embeddings") if newer else 0,
    )


def _table(config: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """A table inside a configuration; empty where it is absent."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise InvalidArgument(f"{name}: {key} is {found!r}; legal is a table of keys")
    return found


@dataclass(frozen=True, slots=True)
class _Keys:
    """One table of a configuration."""

    name: str
    table: str
    values: Mapping[str, Any]

    def number(self, key: str) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgument(
                f"{self.name}: {self.table}.{key} is {value!r}; legal is a positive integer"
            )
        return value

    def length(self, key: str) -> int:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise InvalidArgument(f"{self.name}: {self.table}.{key} is {value!r}; legal is a list")
        return len(value)
