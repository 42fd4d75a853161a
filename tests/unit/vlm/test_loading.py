from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Qwen2_5_VLForConditionalGeneration

from common.vlm.bound import bound_model
from common.vlm.checkpoint import load_checkpoint, save_checkpoint
from common.vlm.errors import ModelFilesError, UnsupportedModel
from common.vlm.files import INDEX_FILE, check_model_files
from common.vlm.loading import check_config, empty_model, load_config, weight_layout
from common.vlm.tiny import random_init, tiny_config
from common.weights.binding import views
from common.weights.checksums import checksums
from common.weights.errors import LayoutMismatch, MissingWeight, UnexpectedWeight

CONFIG = tiny_config()


def tensors_of(bound):
    return views(bound.weights, bound.layout)


def zeros_for(bound, *, dtype=torch.float32):
    return views(torch.zeros(bound.layout.total_elements, dtype=dtype), bound.layout)


@pytest.fixture
def saved(tmp_path):
    """A model folder in several shards, complete but for weights' values that matter."""
    bound = bound_model(CONFIG, dtype=torch.float32, train_vision=False)
    save_checkpoint(tmp_path, CONFIG, bound.layout, tensors_of(bound), max_shard_bytes=200_000)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "preprocessor_config.json").write_text("{}")
    return tmp_path, bound


@pytest.mark.parametrize("tied", [False, True])
def test_the_library_reads_what_is_saved(tmp_path, tied):
    config = tiny_config(tie_word_embeddings=tied)
    bound = bound_model(config, dtype=torch.bfloat16, train_vision=False)
    save_checkpoint(tmp_path, config, bound.layout, tensors_of(bound), max_shard_bytes=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is Qwen2_5_VLForConditionalGeneration
    assert not any(info.values()), info
    expected = dict(bound.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("tied", [False, True])
def test_what_the_library_saves_is_read(tmp_path, tied):
    config = tiny_config(tie_word_embeddings=tied)
    bound = bound_model(config, dtype=torch.float32, train_vision=True)
    bound.model.save_pretrained(tmp_path)
    loaded = zeros_for(bound)
    load_checkpoint(tmp_path, bound.layout, loaded)
    assert checksums(loaded) == checksums(tensors_of(bound))
    assert load_config(tmp_path).text_config.hidden_size == 64


def test_sharded_round_trip_casts(saved):
    folder, bound = saved
    check_model_files(folder)
    low = zeros_for(bound, dtype=torch.bfloat16)
    load_checkpoint(folder, bound.layout, low)
    for name, tensor in tensors_of(bound).items():
        assert torch.equal(low[name], tensor.bfloat16()), name


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), MissingWeight, "lm_head.weight"),
        (lambda t: t.update(strange=torch.ones(1)), UnexpectedWeight, "strange"),
        (lambda t: t.update({"lm_head.weight": torch.ones(2)}), LayoutMismatch, "lm_head.weight"),
    ],
)
def test_every_weight_is_covered(saved, change, error, message):
    folder, bound = saved
    index = json.loads((folder / INDEX_FILE).read_text())
    head_file = folder / index["weight_map"]["lm_head.weight"]
    tensors = load_file(head_file)
    change(tensors)
    save_file(tensors, head_file)
    with pytest.raises(error, match=message):
        load_checkpoint(folder, bound.layout, zeros_for(bound))


def test_damaged_shard_is_named(saved):
    folder, bound = saved
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(b"not safetensors")
    with pytest.raises(ModelFilesError, match=shard.name):
        load_checkpoint(folder, bound.layout, zeros_for(bound))


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "preprocessor_config.json",
        "model-00002-of-00004.safetensors",
        INDEX_FILE,
    ],
)
def test_missing_files_are_named(saved, name):
    folder, _ = saved
    (folder / name).unlink()
    with pytest.raises(ModelFilesError, match=name):
        check_model_files(folder)


def test_combined_processor_file_is_enough(saved):
    folder, _ = saved
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text('{"image_processor": {}}')
    check_model_files(folder)


def test_config_errors_name_key_and_legal_values(tmp_path):
    with pytest.raises(ModelFilesError, match="does not exist"):
        load_config(tmp_path / "absent")
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFilesError, match="not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModel, match="'llama'; legal are qwen2_5_vl"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.text_config.rope_parameters.update(rope_type="dynamic"), "rope_type"),
        (lambda c: setattr(c.text_config, "attention_dropout", 0.1), "attention_dropout"),
        (lambda c: c.text_config.layer_types.append("sliding_attention"), "layer_types"),
    ],
)
def test_settings_that_the_split_pass_lacks_are_refused(change, message):
    config = tiny_config()
    check_config(config)
    change(config)
    with pytest.raises(UnsupportedModel, match=message):
        check_config(config)


@pytest.mark.parametrize("train_vision", [False, True])
def test_layout_freezes_the_tower_and_decays_matrices_only(train_vision):
    model = empty_model(CONFIG, dtype=torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    layout = weight_layout(model, train_vision=train_vision, dtype=torch.float32)
    for entry in layout.entries:
        in_tower = entry.name.startswith("model.visual.")
        assert entry.trainable == (train_vision or not in_tower), entry
        one_dimensional = entry.name.endswith(".bias") or "norm" in entry.name.lower()
        one_dimensional |= "ln_q" in entry.name
        assert entry.decay == (entry.trainable and not one_dimensional), entry


def test_tied_head_is_one_entry():
    model = empty_model(tiny_config(tie_word_embeddings=True), dtype=torch.float32)
    layout = weight_layout(model, train_vision=False, dtype=torch.float32)
    assert layout.aliases == {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    assert "lm_head.weight" not in layout.names


def test_rotary_buffers_equal_a_real_models():
    ours = dict(empty_model(CONFIG, dtype=torch.bfloat16).named_buffers())
    theirs = dict(Qwen2_5_VLForConditionalGeneration(CONFIG).named_buffers())
    assert ours.keys() == theirs.keys()
    for name, buffer in theirs.items():
        assert torch.equal(ours[name], buffer), name
        assert ours[name].dtype == torch.float32


def test_random_weights_depend_on_seed_and_name_alone():
    sums = {}
    for train_vision in (False, True):
        model = empty_model(CONFIG, dtype=torch.float32)
        layout = weight_layout(model, train_vision=train_vision, dtype=torch.float32)
        flat = torch.zeros(layout.total_elements)
        random_init(flat, layout, seed=3)
        sums[train_vision] = checksums(views(flat, layout))
    assert sums[False] == sums[True]
    random_init(flat, layout, seed=4)
    assert checksums(views(flat, layout)) != sums[True]
