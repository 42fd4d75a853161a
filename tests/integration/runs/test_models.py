"""What trains, what does not, and what must not change the result."""

from __future__ import annotations

import pytest

from tests.integration.runs.recipes import checkpoint_tensors, different, recipe
from tests.integration.runs.task import text_rows

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(240)]

VISION = "visual"


async def test_a_frozen_tower_keeps_its_bits_and_a_trained_one_does_not(lab):
    frozen, trained = await lab.succeeded(
        {
            "frozen": recipe(lab.model, model={"train_vision": False}),
            "rollplex": recipe(lab.model),
        }
    )
    start = checkpoint_tensors(lab.model)
    for finished, tower_moves in ((frozen, False), (trained, True)):
        weights = {name: t for name, t in finished.tensors.items() if name in start}
        assert weights.keys() == start.keys()
        moved = different(start, weights)
        assert any(VISION in name for name in moved) is tower_moves
        assert any(VISION not in name for name in moved)
    # Frozen parameters have no optimizer state either.
    assert frozen.tensors["moments"].size < trained.tensors["moments"].size


async def test_activation_checkpointing_changes_no_bit(lab):
    plain, *checkpointed = await lab.succeeded(
        {
            "rollplex": recipe(lab.model),
            "all": recipe(lab.model, training={"activation_checkpointing": True}),
            "tower": recipe(lab.model, training={"vision_checkpointing": True}),
        }
    )
    for finished in checkpointed:
        assert different(plain.tensors, finished.tensors) == []


async def test_a_spilled_optimizer_changes_no_bit(lab):
    """With a checkpoint after each step, which needs the spilled state too."""
    plain, spilled = await lab.succeeded(
        {
            "rollplex": recipe(lab.model),
            "spilled": recipe(
                lab.model, training={"spill_optimizer": True, "checkpoint_every_steps": 1}
            ),
        }
    )
    assert different(plain.tensors, spilled.tensors) == []
    log = lab.node.log("broker-0")
    assert "contents spilled" in log
    assert "contents restored" in log


async def test_prompts_without_pictures(lab):
    source = f"{text_rows.__module__}:{text_rows.__name__}"
    (finished,) = await lab.succeeded({"text": recipe(lab.model, data={"train": source})})
    assert finished.run.samples_dropped == 0
    start = checkpoint_tensors(lab.model)
    weights = {name: t for name, t in finished.tensors.items() if name in start}
    moved = different(start, weights)
    assert moved
    # Nothing reached the tower, though it trains.
    assert not [name for name in moved if VISION in name]
