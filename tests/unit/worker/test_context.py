"""What follows from a recipe and a worker's device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.ids import Participant, RunId, Service
from common.tensors.spec import Residency
from common.weights.layout import TensorSpec, WeightLayout
from common.worker.context import RunContext
from common.worker.optimizer_parts import optimizer_parts
from tests.integration.runs.recipes import recipe

LEARNER = Participant(service=Service.LEARNER)
LAYOUT = WeightLayout.build(
    [TensorSpec(name="matrix", shape=(4, 4), trainable=True, decay=True)], dtype="float32"
)


@pytest.mark.parametrize(
    ("wanted", "device", "residency"),
    [
        ("auto", "cpu", Residency.PINNED),
        ("auto", "cuda", Residency.SPILLABLE),
        (True, "cpu", Residency.SPILLABLE),
        (False, "cuda", Residency.PINNED),
    ],
)
def test_only_what_the_learner_parks_is_declared_spillable(wanted, device, residency):
    context = RunContext(
        run_id=RunId("run"),
        recipe=recipe(Path("model"), training={"spill_optimizer": wanted}),
        run_dir=Path("runs"),
        participant=LEARNER,
        device=torch.device(device),
        broker=None,
        ledger=None,
        resume_from=None,
    )
    (part,) = optimizer_parts(context, LAYOUT, LEARNER)
    assert part.spec.residency is residency
    assert context.spills_optimizer == (residency is Residency.SPILLABLE)
