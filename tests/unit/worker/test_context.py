"""What follows from a recipe and a worker's device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.ids import WORKERS, GroupId, Participant, RunId, Service
from common.step.partners import Partners
from common.step.place import Place
from common.step.plan import PlannedGroup
from common.tensors.spec import Residency
from common.weights.layout import TensorSpec, WeightLayout
from common.worker.context import RunContext
from common.worker.optimizer_parts import optimizer_parts, optimizer_sizes
from tests.integration.runs.recipes import recipe

LEARNER = Participant(service=Service.LEARNER)
LAYOUT = WeightLayout.build(
    [TensorSpec(name="matrix", shape=(4, 4), trainable=True, decay=True)], dtype="float32"
)


def of_run(device="cpu", *, place=None, **training):
    return RunContext(
        run_id=RunId("run"),
        recipe=recipe(Path("model"), training=training),
        run_dir=Path("runs"),
        participant=LEARNER,
        device=torch.device(device),
        broker=None,
        ledger=None,
        resume_from=None,
        place=place or Place(),
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
    context = of_run(device, spill_optimizer=wanted)
    (part,) = optimizer_parts(context, LAYOUT, LEARNER)
    assert part.spec.residency is residency
    assert context.spills_optimizer == (residency is Residency.SPILLABLE)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_have_the_state_of_all_weights_together(replicas):
    layout = WeightLayout.build(
        [TensorSpec(name="matrix", shape=(1000, 7), trainable=True, decay=True)], dtype="float32"
    )
    covered = []
    for replica in range(replicas):
        place = Place(rank=2 * replica + 1, degree=2, replicas=replicas)
        context = of_run(place=place, optimizer_part_mib=1 / 128)
        parts = optimizer_parts(context, layout, LEARNER)
        assert len(parts) > 1
        for part in parts:
            (moments,) = part.spec.tensors
            assert moments.shape == (2, part.elements.stop - part.elements.start)
        covered += [number for part in parts for number in range(7008)[part.elements]]
        sizes = optimizer_sizes(context, layout)
        assert sum(sizes) == 8 * (7008 - 7008 // replicas * (replicas - 1))
    assert covered == list(range(layout.trainable_elements)) == list(range(7008))


def test_ranks_of_a_replica_work_together():
    context = of_run(place=Place(rank=3, degree=2, replicas=2))
    assert context.degree == context.arena_ranks == 2
    assert replace(context, device=torch.device("cuda")).arena_ranks == 1
    assert not context.leads
    assert not context.speaks_for_all
    context = replace(context, partners=Partners.alike(degree=2, replicas=2))
    assert [str(one) for one in context.ranks] == ["learner/2", "learner/3"]


def test_a_group_is_read_where_it_is_decoded():
    partners = Partners(
        dict.fromkeys(WORKERS, 2) | {Service.ROLLOUT: 1},
        dict.fromkeys(WORKERS, 1) | {Service.ROLLOUT: 2},
    )
    context = replace(of_run(place=Place(degree=2)), partners=partners)
    for replica in range(2):
        group = PlannedGroup(group=GroupId(0), split="train", sample=0, rollout_replica=replica)
        (reader,) = context.readers(Service.ROLLOUT, group)
        assert reader == Participant(service=Service.ROLLOUT, rank=replica)
        (beside,) = context.readers(Service.PREFIX_ENCODER, group)
        assert beside == Participant(service=Service.PREFIX_ENCODER)
