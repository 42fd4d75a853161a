"""Parameter counts against the library's own models, and configurations that are refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from common.errors import InvalidArgument
from common.vlm.errors import ModelFilesError, UnsupportedModel
from common.vlm.published import PUBLISHED
from common.vlm.shape import read_shape, shape_of
from common.vlm.tiny import tiny_config
from rollplex.plan.weights import Split, parameter_count, rank_elements, weights

QWEN3 = Qwen3VLConfig(
    text_config={
        "model_type": "qwen3_vl_text",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
    },
    vision_config={
        "model_type": "qwen3_vl_vision",
        "depth": 6,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_heads": 4,
        "out_hidden_size": 256,
        "deepstack_visual_indexes": [1, 3],
        "num_position_embeddings": 64,
    },
)


def real_count(config):
    kind = (
        Qwen3VLForConditionalGeneration
        if isinstance(config, Qwen3VLConfig)
        else Qwen2_5_VLForConditionalGeneration
    )
    with torch.device("meta"):
        model = kind._from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(),
        tiny_config(tie_word_embeddings=True, heads=8, kv_heads=2),
        QWEN3,
        Qwen2_5_VLConfig(**PUBLISHED["qwen2.5-vl-3b"]),
    ],
    ids=["tiny", "tied", "qwen3", "3b"],
)
def test_counts_are_those_of_the_real_model(tmp_path, config):
    config.save_pretrained(tmp_path)
    assert parameter_count(read_shape(str(tmp_path))) == real_count(config)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-vl-3b", 3.75),
        ("qwen2.5-vl-7b", 8.29),
        ("qwen2.5-vl-32b", 33.45),
        ("qwen2.5-vl-72b", 73.4),
    ],
)
def test_published_sizes(name, billions):
    assert parameter_count(read_shape(name)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_flat_configuration_is_the_nested_one():
    nested = PUBLISHED["qwen2.5-vl-7b"]
    flat = {**nested, **nested["text_config"]}
    del flat["text_config"]
    assert shape_of(flat, name="a") == shape_of(nested, name="a")


def test_ranks_hold_their_part():
    shape = read_shape("qwen2.5-vl-32b")
    assert rank_elements(shape, 1) == parameter_count(shape)
    whole = sum(w.elements * w.count for w in weights(shape) if w.split is Split.WHOLE)
    assert rank_elements(shape, 8) == whole + (parameter_count(shape) - whole) // 8


def test_more_ranks_than_key_value_heads_hold_them_twice():
    shape = read_shape("qwen2.5-vl-3b")
    keys = [w for w in weights(shape) if w.split is Split.KV_HEADS]
    even = [w for w in weights(shape) if w.split is Split.EVEN]
    whole = [w for w in weights(shape) if w.split is Split.WHOLE]

    def count(listed):
        return sum(w.elements * w.count for w in listed)

    assert rank_elements(shape, 4) == count(even) // 4 + count(keys) // 2 + count(whole)


def test_a_tower_that_does_not_divide_is_whole_on_every_rank():
    shape = read_shape("qwen2.5-vl-3b")
    tower = sum(w.elements * w.count for w in weights(shape) if w.vision)
    text = rank_elements(shape, 8, trainable_vision=False)
    assert rank_elements(shape, 8) == text + tower


def test_a_model_that_is_nowhere():
    with pytest.raises(InvalidArgument, match=r"qwen2\.5-vl-3b, .*, qwen2\.5-vl-72b"):
        read_shape("qwen2.5-vl-33b")


def test_a_folder_without_configuration(tmp_path):
    with pytest.raises(ModelFilesError, match=r"cannot read .*config\.json"):
        read_shape(str(tmp_path))


def test_another_type_of_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UnsupportedModel, match="'llama'; legal are qwen2_5_vl, qwen3_vl"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize("value", [None, 0, -1, "64", True])
def test_a_key_that_is_no_size(value):
    config = json.loads(json.dumps(PUBLISHED["qwen2.5-vl-3b"]))
    config["text_config"]["num_hidden_layers"] = value
    with pytest.raises(InvalidArgument, match=r"text_config\.num_hidden_layers is .*positive"):
        shape_of(config, name="a")


@pytest.mark.parametrize(
    ("table", "key", "value", "message"),
    [
        (None, "text_config", [1], "text_config is .* legal is a table"),
        (None, "vision_config", "x", "vision_config is 'x'; legal is a table"),
        ("vision_config", "deepstack_visual_indexes", 5, r"deepstack_visual_indexes is 5; .* list"),
        ("vision_config", "depth", 1.5, r"vision_config\.depth is 1\.5; .*positive integer"),
    ],
)
def test_a_key_of_another_kind(table, key, value, message):
    config = QWEN3.to_dict()
    (config if table is None else config[table])[key] = value
    with pytest.raises(InvalidArgument, match=message):
        shape_of(config, name="a")


def test_a_width_that_heads_do_not_divide():
    config = json.loads(json.dumps(PUBLISHED["qwen2.5-vl-3b"]))
    config["text_config"]["hidden_size"] = 2047
    with pytest.raises(InvalidArgument, match=r"hidden_size is 2047; .* num_attention_heads = 16"):
        shape_of(config, name="a")
