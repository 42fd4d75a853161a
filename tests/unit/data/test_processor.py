"""Rows become prompts; what does not fit is refused by name."""

from __future__ import annotations

import json
import pickle
import shutil

import numpy as np
import pytest
import torch

from common.data.errors import SampleError, SampleFault
from common.data.processor import PromptLimits, PromptProcessor
from common.vlm.errors import ModelFilesError


def picture(height=28, width=28, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def image(height=28, width=28, seed=0):
    return {"type": "image", "image": picture(height, width, seed)}


def text(words="Which digit is it?"):
    return {"type": "text", "text": words}


def row(*parts, **fields):
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


def test_one_picture(processor):
    prepared = processor.prepare(row(image(56, 84), text(), answer="7"), sample="train[0]")
    prompt = prepared.prompt()
    tokenizer = processor.tokenizer
    assert tokenizer.decode(prompt.token_ids) == (
        "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>"
        "Which digit is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.image_grid_thw.tolist() == [[1, 4, 6]]
    assert prompt.vision_tokens == 6
    assert prepared.prompt_tokens == len(prompt.token_ids)
    first = prompt.mm_token_type_ids.tolist().index(1)
    assert prompt.positions[:, first : first + 6].tolist() == [
        [first] * 6,
        [first] * 3 + [first + 1] * 3,
        [first, first + 1, first + 2] * 2,
    ]
    assert json.loads(prepared.row_json) == {"answer": "7"}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_ragged_rows(processor, count):
    images = [image(28, 28 * (n + 1), seed=n) for n in range(count)]
    prompt = processor.prepare(row(*images, text()), sample="s").prompt()
    assert prompt.image_grid_thw.tolist() == [[1, 2, 2 * (n + 1)] for n in range(count)]
    assert prompt.pixel_values.shape == (sum(4 * (n + 1) for n in range(count)), 1176)
    assert prompt.video_grid_thw.shape == (0, 3)
    assert prompt.pixel_values_videos.shape == (0, 1176)
    for number, part in enumerate(images):
        alone = processor.prepare(row(part, text()), sample="s").prompt().pixel_values
        start = sum(4 * (n + 1) for n in range(number))
        assert (prompt.pixel_values[start : start + len(alone)] == alone).all()


def test_pictures_and_a_video_over_several_turns(processor):
    video = {
        "type": "video",
        "video": np.stack([picture(seed=n) for n in range(5)]),
        "fps": 30.0,
        "frames_indices": [0, 15, 30, 45, 60],
    }
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image(), text("and"), video]},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": [text("What comes next?"), image(56, 56)]},
    ]
    prepared = processor.prepare({"messages": messages}, sample="s")
    prompt = prepared.prompt()
    assert prompt.image_grid_thw.tolist() == [[1, 2, 2], [1, 4, 4]]
    assert prompt.video_grid_thw.tolist() == [[3, 2, 2]]
    assert prompt.second_per_grid_ts.tolist() == [1.0]
    decoded = processor.tokenizer.decode(prompt.token_ids)
    assert decoded.count("<|image_pad|>") == 5
    assert decoded.count("<|video_pad|>") == 3
    places = np.flatnonzero(prompt.mm_token_type_ids.numpy() == 2)
    times = prompt.positions[0, places]
    assert (times - times[0]).tolist() == [0, 4, 8]


def test_text_only_as_a_string(processor):
    messages = [{"role": "user", "content": "Which digit is it?"}]
    prompt = processor.prepare({"messages": messages}, sample="s").prompt()
    assert prompt.vision_tokens == 0
    assert prompt.positions[0].tolist() == list(range(len(prompt.token_ids)))


def test_equal_rows_give_equal_arrays(processor):
    one, two = (processor.prepare(row(image(56, 56), text()), sample="s") for _ in range(2))
    assert all(np.array_equal(one.arrays[name], two.arrays[name]) for name in one.arrays)
    assert one.size_bytes == sum(a.nbytes for a in one.arrays.values()) + len(one.row_json)


def fault_of(processor, bad):
    with pytest.raises(SampleError) as caught:
        processor.prepare(bad, sample="train[9]")
    assert "train[9]" in str(caught.value)
    return caught.value


def test_pixels_are_rounded_as_a_tower_in_bfloat16_does_it(processor):
    exact = processor.prepare(row(image(), text()), sample="train[0]")
    rounded = pickle.loads(pickle.dumps(exact.rounded_to_bfloat16()))
    expected = exact.prompt().pixel_values.to(torch.bfloat16)
    assert torch.equal(rounded.prompt().pixel_values, expected)
    assert rounded.prompt().pixel_values_videos.dtype is torch.bfloat16
    assert exact.size_bytes - rounded.size_bytes == expected.nbytes
    for name in ("token_ids", "positions", "image_grid_thw"):
        assert torch.equal(getattr(rounded.prompt(), name), getattr(exact.prompt(), name))


def test_the_limit_counts_expanded_tokens_and_never_cuts(processor, model_folder):
    fits = processor.prepare(row(image(112, 112), text()), sample="s").prompt_tokens
    exact = PromptProcessor(model_folder, PromptLimits(max_prompt_tokens=fits))
    exact.prepare(row(image(112, 112), text()), sample="s")
    tight = PromptProcessor(model_folder, PromptLimits(max_prompt_tokens=fits - 1))
    error = fault_of(tight, row(image(112, 112), text()))
    assert error.fault is SampleFault.TOO_LONG
    assert (error.data["tokens"], error.data["vision_tokens"]) == (fits, 16)
    assert error.data["limit"] == fits - 1
    for number in (fits, 16, fits - 1):
        assert str(number) in str(error)


def test_placeholders_written_in_the_text_are_found_out(processor):
    error = fault_of(processor, row(image(), text("what is <|image_pad|>?")))
    assert error.fault is SampleFault.PLACEHOLDER_MISMATCH
    assert "2 image placeholders, the row has 1 images" in str(error)
    error = fault_of(processor, row(text("<|video_pad|>")))
    assert error.fault is SampleFault.PLACEHOLDER_MISMATCH


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        ["hello"],
        [{"content": "no role"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "audio", "audio": 1}]}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 3}]}],
        [{"role": "user", "content": ["text"]}],
    ],
)
def test_messages_out_of_format(processor, messages):
    assert fault_of(processor, {"messages": messages}).fault is SampleFault.BAD_MESSAGES


def test_no_text(processor):
    assert fault_of(processor, row(image())).fault is SampleFault.NO_TEXT
    assert fault_of(processor, row(image(), text(" \n"))).fault is SampleFault.NO_TEXT


@pytest.mark.parametrize("value", [float("nan"), np.int64(3), b"x", {1}, "\ud800"])
def test_fields_that_are_not_json(processor, value):
    error = fault_of(processor, row(text(), fine=1, odd=value))
    assert error.fault is SampleFault.BAD_FIELDS
    assert "'odd'" in str(error)


def test_errors_survive_a_process_border(processor):
    error = fault_of(processor, row(image()))
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.fault, copy.sample, copy.data) == (error.fault, error.sample, error.data)


def test_settings_that_do_not_fit_the_model(model_folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(settings | {"patch_size": 16}))
    with pytest.raises(ModelFilesError, match="patch_size is 16, the model's is 14"):
        PromptProcessor(other, PromptLimits(max_prompt_tokens=10))
    (other / "preprocessor_config.json").unlink()
    with pytest.raises(ModelFilesError, match=r"preprocessor_config\.json"):
        PromptProcessor(other, PromptLimits(max_prompt_tokens=10))


def test_no_chat_template(model_folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    (other / "chat_template.jinja").unlink()
    with pytest.raises(ModelFilesError, match="no chat template"):
        PromptProcessor(other, PromptLimits(max_prompt_tokens=10))
