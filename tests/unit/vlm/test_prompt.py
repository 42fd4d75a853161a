from __future__ import annotations

import pytest
import torch

from common.vlm.errors import PromptInvalid
from common.vlm.loading import empty_model
from common.vlm.prompt import PromptTensors, prepare_prompt
from common.vlm.tiny import IMAGE_TOKEN_ID, VIDEO_TOKEN_ID, tiny_config, tiny_prompt

CONFIG = tiny_config()
WIDTH = 3 * 2 * 14 * 14


def prepare(ids, images=(), videos=(), seconds=None):
    def pixels(grids):
        return torch.zeros((sum(t * h * w for t, h, w in grids), WIDTH))

    return prepare_prompt(
        CONFIG,
        token_ids=torch.tensor(ids),
        pixel_values=pixels(images),
        image_grid_thw=torch.tensor(list(images), dtype=torch.int64).reshape(-1, 3),
        pixel_values_videos=pixels(videos),
        video_grid_thw=torch.tensor(list(videos), dtype=torch.int64).reshape(-1, 3),
        second_per_grid_ts=seconds,
        sample="sample 7",
    )


def test_text_counts_up():
    prompt = prepare([9, 10, 11, 12])
    assert prompt.positions.tolist() == [[0, 1, 2, 3]] * 3
    assert (prompt.prefix_tokens, prompt.last_token) == (3, 12)
    assert (prompt.start_position, prompt.rope_delta, prompt.vision_tokens) == (3, 0, 0)


def test_image_spans_a_box_and_text_goes_on_from_its_longer_side():
    # 2 x 3 merged patches after two text tokens
    prompt = prepare([9, 1, *[IMAGE_TOKEN_ID] * 6, 2, 9], images=[(1, 4, 6)])
    assert prompt.positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert prompt.mm_token_type_ids.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    assert (prompt.start_position, prompt.rope_delta) == (6, -3)


@pytest.mark.parametrize(
    ("seconds", "times"),
    [(1.0, [0, 2, 4]), (0.5, [0, 1, 2]), (0.4, [0, 0, 1]), (1.25, [0, 2, 5])],
)
def test_video_time_is_scaled_then_truncated_and_text_goes_on_after_it(seconds, times):
    # tokens_per_second is 2; three temporal patches of 1 x 2 merged patches
    prompt = prepare(
        [1, *[VIDEO_TOKEN_ID] * 6, 2], videos=[(3, 2, 4)], seconds=torch.tensor([seconds])
    )
    assert prompt.positions[0, 1:7].tolist() == [1 + t for t in times for _ in range(2)]
    assert prompt.positions[1, 1:7].tolist() == [1] * 6
    assert prompt.positions[2, 1:7].tolist() == [1, 2] * 3
    assert prompt.start_position == 1 + max(times[-1], 1) + 1


@pytest.mark.parametrize(
    "grids",
    [
        {},
        {"images": [(1, 4, 6)]},
        {"images": [(1, 4, 6), (1, 8, 2)], "videos": [(2, 6, 4), (1, 2, 2)]},
    ],
)
def test_positions_equal_the_librarys_where_time_stays_inside_the_box(grids):
    prompt = tiny_prompt(CONFIG, **grids)
    positions, delta = empty_model(CONFIG, dtype=torch.float32).model.get_rope_index(
        prompt.token_ids[None],
        prompt.mm_token_type_ids[None],
        image_grid_thw=prompt.image_grid_thw,
        video_grid_thw=prompt.video_grid_thw,
        second_per_grid_ts=prompt.second_per_grid_ts,
    )
    assert torch.equal(positions[:, 0], prompt.positions)
    assert int(delta) == prompt.rope_delta


@pytest.mark.parametrize(
    ("ids", "grids", "message"),
    [
        ([1, *[IMAGE_TOKEN_ID] * 5, 2], {"images": [(1, 4, 6)]}, r"5 image tokens .* 6 features"),
        ([1, IMAGE_TOKEN_ID, 2], {}, "more image placeholders than grids"),
        ([9, 9], {"videos": [(1, 2, 2)]}, "1 video grids without placeholders"),
        ([1, IMAGE_TOKEN_ID], {"images": [(1, 2, 2)]}, "ends in a vision placeholder"),
        ([1, IMAGE_TOKEN_ID, 2], {"images": [(1, 3, 2)]}, "multiples of 2"),
        ([], {}, "token_ids has shape"),
        (
            [1, VIDEO_TOKEN_ID, 2],
            {"videos": [(1, 2, 2)], "seconds": torch.ones(2)},
            "2 values of second_per_grid_ts",
        ),
    ],
)
def test_disagreement_is_an_error_that_names_the_sample(ids, grids, message):
    with pytest.raises(PromptInvalid, match=rf"sample 7.*{message}"):
        prepare(ids, **grids)


def test_pixels_must_fill_the_grids():
    with pytest.raises(PromptInvalid, match=r"pixel_values has shape \(0, 1176\).*\(4, 1176\)"):
        prepare_prompt(
            CONFIG,
            token_ids=torch.tensor([1, IMAGE_TOKEN_ID, 2]),
            image_grid_thw=torch.tensor([[1, 2, 2]]),
        )


def test_named_tensors_round_trip():
    prompt = tiny_prompt(CONFIG, images=[(1, 4, 4)])
    named = prompt.named_tensors()
    again = PromptTensors.from_named_tensors({**named, "more": torch.zeros(1)})
    assert all(torch.equal(getattr(again, name), tensor) for name, tensor in named.items())
    del named["positions"]
    with pytest.raises(PromptInvalid, match="lacks positions"):
        PromptTensors.from_named_tensors(named)
