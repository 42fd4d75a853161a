"""What a prefix-encoder keeps for the next step's prompts."""

from __future__ import annotations

import torch

from common.events import bodies
from common.ids import GroupId
from common.step.plan import PlannedGroup
from common.step.schedule import Schedule
from common.step.view import StepView
from common.vlm.prefix import PrefixKV
from common.vlm.prompt import PromptTensors
from services.prefix_encoder.ahead import AheadStore, LoadedPrompt, sample_key
from services.prefix_encoder.ahead_step import while_decoding
from tests.unit.step.test_schedule import folded, plan

PATCH_BYTES = 4


def loaded(patches: int) -> LoadedPrompt:
    """A prompt of nothing but patches of one number each."""
    ids, grids = torch.zeros(0, dtype=torch.int64), torch.zeros((0, 3), dtype=torch.int64)
    prompt = PromptTensors(
        token_ids=ids,
        positions=ids.view(3, 0),
        mm_token_type_ids=ids,
        pixel_values=torch.zeros((patches, 1)),
        image_grid_thw=grids,
        pixel_values_videos=torch.zeros((0, 1)),
        video_grid_thw=grids,
        second_per_grid_ts=torch.zeros(0),
    )
    return LoadedPrompt(text=prompt.without_pixels(), row_json=b"{}", prompt=prompt)


def store(*, patches=10, reference_limit=None):
    return AheadStore(limit_bytes=patches * PATCH_BYTES, reference_limit=reference_limit)


def put(kept: AheadStore, row: int, patches: int) -> bool:
    prompt = loaded(patches)
    with kept.room(prompt.size_bytes) as fits:
        if fits:
            kept.put(("train", row), prompt)
    return fits


def test_prompts_are_kept_up_to_the_limit():
    kept = store(patches=10)
    assert put(kept, 0, 6)
    assert not put(kept, 1, 5)
    assert put(kept, 2, 4)
    assert set(kept.samples) == {("train", 0), ("train", 2)}
    assert kept.used_bytes == 10 * PATCH_BYTES


def test_a_row_that_a_step_has_twice_keeps_what_was_made_of_it():
    kept = store()
    assert put(kept, 0, 3)
    first = kept.get(("train", 0))
    assert put(kept, 0, 3)
    assert kept.get(("train", 0)) is first
    assert kept.used_bytes == 3 * PATCH_BYTES


def test_prompts_on_their_way_count():
    kept = store(patches=10)
    with kept.room(6 * PATCH_BYTES) as first, kept.room(6 * PATCH_BYTES) as second:
        assert (first, second) == (True, False)
    assert kept.used_bytes == 0


def test_without_pixels_there_is_room_for_more():
    kept = store(patches=10)
    assert put(kept, 0, 10)
    first = kept.get(("train", 0))
    first.prompt = first.prompt.without_pixels()
    first.vision = torch.zeros(2)
    assert not put(kept, 1, 9)
    assert put(kept, 1, 8)


def test_a_taken_prompt_is_the_takers():
    kept = store()
    assert put(kept, 0, 1)
    assert kept.take(("train", 0)) is not None
    assert kept.take(("train", 0)) is None


def test_what_no_plan_wants_is_dropped():
    kept = store()
    for row in range(3):
        assert put(kept, row, 1)
    kept.keep_only({sample_key(PlannedGroup(group=GroupId(0), split="train", sample=1))})
    assert set(kept.samples) == {("train", 1)}
    kept.clear()
    assert kept.used_bytes == 0


def test_reference_prefixes_are_counted():
    kept = store(reference_limit=1)
    assert put(kept, 0, 1)
    assert kept.takes_reference
    kept.get(("train", 0)).reference = PrefixKV(keys=[torch.zeros(1)], values=[torch.zeros(1)])
    assert not kept.takes_reference
    kept.take(("train", 0))
    assert kept.takes_reference
    assert not store(reference_limit=0).takes_reference


def test_a_job_ahead_only_runs_while_sequences_decode():
    view = StepView(plan(Schedule.FUSED), needs_reference=False)
    job = while_decoding(view, lambda: "done")
    assert job() is None
    folded(view, (bodies.WindowOpened(), None))
    assert job() == "done"
    folded(view, (bodies.WindowClosed(decode_iterations=1, response_tokens=1), None))
    assert job() is None


def test_a_job_ahead_that_finds_no_memory_gives_nothing():
    view = folded(StepView(plan(), needs_reference=False), (bodies.WindowOpened(), None))

    def job():
        raise torch.OutOfMemoryError("there is none")

    assert while_decoding(view, job)() is None
