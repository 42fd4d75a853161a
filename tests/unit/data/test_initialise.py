"""A model folder made from a specification is an ordinary one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

from common.config.base import ConfigError
from common.data.tokenizer import SPECIAL_TOKENS, train_tokenizer
from common.errors import AlreadyExists, InvalidArgument
from common.vlm.checkpoint import load_checkpoint
from common.vlm.errors import ModelFilesError
from common.vlm.files import check_model_files
from common.vlm.initialise import (
    ModelSpec,
    TextSpec,
    TokenizerSpec,
    VisionSpec,
    initialise,
    load_spec,
    rotary_sections,
)
from common.vlm.loading import empty_model, load_config, weight_layout
from common.weights.binding import views

TOKENIZER = TokenizerSpec(texts=("Which digit is it?",))


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_and_our_loader_read_the_same_weights(tmp_path, tied):
    report = initialise(
        ModelSpec(tokenizer=TOKENIZER, text=TextSpec(tied_embeddings=tied)), tmp_path / "m"
    )
    check_model_files(report.path)
    model, info = AutoModelForImageTextToText.from_pretrained(report.path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    theirs = dict(model.named_parameters())
    assert sum(p.numel() for p in theirs.values()) == report.parameters
    config = load_config(report.path)
    empty = empty_model(config, dtype=torch.float32)
    layout = weight_layout(empty, train_vision=True, dtype=torch.float32)
    flat = torch.zeros(layout.total_elements)
    tensors = views(flat, layout)
    load_checkpoint(report.path, layout, tensors)
    for name, ours in tensors.items():
        assert torch.equal(ours, theirs[name].detach()), name
    assert config.tie_word_embeddings is tied


def test_weights_are_sharded_and_depend_on_the_seed_alone(tmp_path):
    def folder(name, seed):
        torch.rand(3)
        path = initialise(ModelSpec(tokenizer=TOKENIZER, seed=seed), tmp_path / name).path
        index = json.loads((path / "model.safetensors.index.json").read_text())
        shards = sorted(set(index["weight_map"].values()))
        assert len(shards) >= 2
        return [(path / shard).read_bytes() for shard in shards]

    state = torch.get_rng_state()
    assert folder("a", 1) == folder("b", 1)
    assert folder("c", 2) != folder("a2", 1)
    torch.set_rng_state(state)


def test_special_tokens_and_digits_are_single_tokens(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for digit in "0123456789":
        assert len(tokenizer.encode(digit, add_special_tokens=False)) == 1
    assert len(tokenizer.encode("2026", add_special_tokens=False)) == 4
    ids = [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS]
    assert ids == list(range(len(tokenizer) - len(SPECIAL_TOKENS), len(tokenizer)))
    config = load_config(model_folder)
    assert config.text_config.vocab_size == len(tokenizer)
    assert config.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert config.video_token_id == tokenizer.convert_tokens_to_ids("<|video_pad|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == end
    assert GenerationConfig.from_pretrained(model_folder).eos_token_id[0] == end


def test_any_text_survives_the_tokenizer(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for words in ("naïve 猫 🙂\n\ttabs  spaces", "Which digit is it?", " "):
        assert tokenizer.decode(tokenizer.encode(words, add_special_tokens=False)) == words


def test_the_model_predicts_from_pictures(model_folder, processor):
    picture = np.full((28, 28, 3), 90, dtype=np.uint8)
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "Which digit is it?"}]
    prompt = processor.prepare(
        {"messages": [{"role": "user", "content": content}]}, sample="s"
    ).prompt()
    model = AutoModelForImageTextToText.from_pretrained(model_folder)
    with torch.no_grad():
        logits = model(
            input_ids=prompt.token_ids[None],
            mm_token_type_ids=prompt.mm_token_type_ids[None],
            pixel_values=prompt.pixel_values,
            image_grid_thw=prompt.image_grid_thw,
        ).logits[0, -1]
    spread = logits.std()
    assert 0.01 < spread < 1.0  # all tokens are likely at the start, so all are tried


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "m").mkdir()
    initialise(ModelSpec(tokenizer=TOKENIZER), tmp_path / "m")
    before = sorted(entry.name for entry in tmp_path.rglob("*"))
    with pytest.raises(AlreadyExists, match="not an empty folder"):
        initialise(ModelSpec(tokenizer=TOKENIZER), tmp_path / "m")
    with pytest.raises(InvalidArgument):
        initialise(ModelSpec(tokenizer=TokenizerSpec(texts="no.such:thing")), tmp_path / "n")
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[text]\nhidden = 66\nheads = 4\n", "hidden .66. over heads .4."),
        ("[text]\nkv_heads = 3\n", "kv_heads .3. must divide heads .4."),
        ("[text]\nhidden = 16\n", "8 dimensions or more"),
        ("[vision]\nheads = 5\n", "multiple of 4"),
        ("[vision]\nwindow = 50\n", "window .50. must be a multiple"),
        ("[vision]\nfull_attention_blocks = [2]\n", "must lie in 0..1"),
        ("[vision]\nmin_pixels = 100\n", "min_pixels .100."),
        ("[vision]\nmin_pixel = 100\n", "min_pixels"),
        ("shards = 1\n", "shards"),
    ],
)
def test_wrong_values_are_named(tmp_path, table, words):
    file = tmp_path / "model.toml"
    file.write_text(table + '[tokenizer]\ntexts = ["a"]\n')
    with pytest.raises(ConfigError, match=words):
        load_spec(file)


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(InvalidArgument, match="at least 263"):
        train_tokenizer(["a"], vocab_tokens=262)
    assert len(train_tokenizer(["a"], vocab_tokens=263)) == 263


@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 128])
def test_rotary_sections_fill_half_a_head(head_dim):
    sections = rotary_sections(head_dim)
    assert sum(sections) == head_dim // 2
    assert min(sections) > 0
    assert rotary_sections(128) == (16, 24, 24)


def test_other_shapes_load_too(tmp_path):
    spec = ModelSpec(
        text=TextSpec(hidden=48, heads=2, kv_heads=1, layers=1),
        vision=VisionSpec(depth=1, hidden=32, full_attention_blocks=(0,)),
        tokenizer=TOKENIZER,
        shards=4,
    )
    report = initialise(spec, tmp_path / "deep" / "m")
    AutoModelForImageTextToText.from_pretrained(report.path)
    assert sum(name.endswith(".safetensors") for name in report.files) >= 4


def test_a_folder_without_weights_serves_runs_with_random_ones(tmp_path):
    spec = ModelSpec(tokenizer=TOKENIZER.model_copy(update={"fill_to_tokens": 1000}))
    report = initialise(spec, tmp_path / "m", weights=False)
    assert not [name for name in report.files if name.endswith(".safetensors")]
    assert report.parameters > 64 * 1000
    check_model_files(report.path, weights=False)
    with pytest.raises(ModelFilesError, match="safetensors"):
        check_model_files(report.path)
    assert load_config(report.path).text_config.vocab_size == 1000


def test_filler_tokens_decode_and_are_reached_by_no_text(tmp_path):
    spec = ModelSpec(tokenizer=TOKENIZER.model_copy(update={"fill_to_tokens": 1000}))
    initialise(spec, tmp_path / "m", weights=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert len(tokenizer) == 1000
    text = tokenizer.decode([991, 992])
    assert text == "[filler-991][filler-992]"
    assert max(tokenizer.encode(text, add_special_tokens=False)) < 400
