"""The ledger as clients see it: series, groups, the picture."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
from PIL import Image

from common.errors import Unavailable
from common.step.plan import StepMode
from common.tensors.parts import part_names
from common.tensors.storage import StorageSpec
from rollplex.cli.memory_tables import size
from rollplex.ledger import ledger_from_proto
from rollplex.models import StepRecord
from rollplex.report.memory import MemorySeries, draw_memory, sample_memory, sampled_memory
from rollplex.report.run_files import Span
from rollplex.report.step_phases import step_phases
from services.broker.translate import ledger_to_proto
from tests.unit.broker.driver import ENCODER, GPU, GPU_PAGE, LEARNER, Driver, pages

pytestmark = pytest.mark.usefixtures("drawing_fonts")


@pytest.fixture
def drive():
    driver = Driver(gpu_pages=8)
    driver.begin(1)
    return driver


def ledger_of(drive):
    return ledger_from_proto(ledger_to_proto(drive.state.ledger(), device=GPU))


def test_series_add_up_to_the_ledger(drive):
    drive.lease(ENCODER, LEARNER, name="policy.prefix_kv")
    drive.lease(ENCODER, LEARNER, name="policy.prefix_kv")
    drive.hold_own(ENCODER, 3)
    drive.hold_own(LEARNER, 1)
    ledger = ledger_of(drive)
    assert ledger.by_series() == {
        "policy.prefix_kv": 2 * GPU_PAGE,
        "prefix-encoder/0 allocator": 3 * GPU_PAGE,
        "learner/0 allocator": GPU_PAGE,
    }
    assert sum(ledger.by_series().values()) == ledger.arena().total_bytes == 6 * GPU_PAGE
    assert ledger.arena("cpu").total_bytes == 0


def test_groups_are_one_a_class_and_state(drive):
    sealed = [drive.sealed(ENCODER, LEARNER, name="policy.prefix_kv") for _ in range(3)]
    drive.acquire(LEARNER, sealed[0])
    drive.lease(ENCODER, LEARNER, name="policy.prefix_kv")
    drive.hold_own(LEARNER, 7)
    found = [(g.first.name, g.first.state, len(g.entries)) for g in ledger_of(drive).groups()]
    assert found == [
        ("policy.prefix_kv", "sealed", 3),
        ("policy.prefix_kv", "allocated", 1),
        ("allocator", "held", 1),
    ]
    group = ledger_of(drive).groups()[0]
    assert group.size_bytes == 3 * GPU_PAGE
    assert group.holders == ["learner/0"]
    assert group.until == ["learner/0 released it after decode"]


def test_parts_of_a_whole_are_one_class(drive):
    for name in part_names("policy.optimizer", 3):
        spec = StorageSpec(tensors=pages(1), readers=(), writers=(LEARNER,))
        drive.answer(drive.open(LEARNER, spec, name=name))
    ledger = ledger_of(drive)
    assert ledger.by_series() == {"policy.optimizer": 3 * GPU_PAGE}
    (group,) = ledger.groups()
    assert (group.first.class_name, len(group.entries)) == ("policy.optimizer", 3)


async def test_the_picture_is_of_every_sample(drive, tmp_path):
    moments = iter(
        [
            lambda: None,
            lambda: drive.lease(ENCODER, LEARNER, name="policy.prefix_kv"),
            lambda: drive.hold_own(ENCODER, 5),
            lambda: drive.hold_own(ENCODER, 0),
        ]
    )
    totals = []

    async def ask():
        next(moments, lambda: None)()
        ledger = ledger_of(drive)
        totals.append(ledger.arena().total_bytes)
        return ledger

    series = MemorySeries()
    for second in range(4):
        series.add(float(second), await ask())
    assert series.totals == totals == [0, GPU_PAGE, 6 * GPU_PAGE, GPU_PAGE]
    assert [sum(values) for values in zip(*series.classes.values(), strict=True)] == totals
    assert series.classes["prefix-encoder/0 allocator"] == [0, 0, 5 * GPU_PAGE, 0]
    assert series.peak_bytes == 6 * GPU_PAGE
    assert (series.device, series.capacity_bytes) == (GPU, 8 * GPU_PAGE)
    draw_memory(series, tmp_path / "out.png")
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 500


async def test_sampling_takes_two_samples_at_least(drive, tmp_path):
    async def ask():
        return ledger_of(drive)

    series = await sample_memory(ask, seconds=0.0, every_s=0.0)
    assert len(series.times_s) == len(series.totals) == 2
    assert series.times_s == sorted(series.times_s)
    draw_memory(series, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


def test_sizes_for_people():
    assert [size(value) for value in (0, 1023, 1536, 3 << 19, 5 << 29, 1 << 45)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "1.50 MiB",
        "2.50 GiB",
        "32768.00 GiB",
    ]


def span(task, start_s, end_s, epoch=4):
    return Span(
        step=2,
        epoch=epoch,
        mode=StepMode.TRAIN,
        group=None,
        task=task,
        participant="learner/0",
        start_s=start_s,
        end_s=end_s,
    )


SPANS = [
    span("prepare", 9.0, 9.5, epoch=3),
    span("prepare", 10.2, 10.3),
    span("policy_vision", 10.3, 10.4),
    span("window", 11.0, 12.0),
    span("response_train", 12.0, 12.4),
    span("prefix_backward", 12.4, 12.6),
    span("response_train", 12.6, 12.8),
    span("update", 13.0, 13.5),
    span("update", 14.5, 15.0, epoch=5),
]


def record(epoch=4, wall_s=3.5):
    return StepRecord(
        step=2,
        epoch=epoch,
        mode=StepMode.TRAIN,
        weights_version=3,
        wall=timedelta(seconds=wall_s),
        metrics={},
    )


def test_a_step_is_from_its_attempts_start_to_its_last_work():
    phases = step_phases(record(), SPANS)
    assert (phases.step, phases.epoch) == (2, 4)
    assert (phases.start_s, phases.end_s) == (10.0, 13.5)
    assert phases.windows == ((11.0, 12.0),)
    assert phases.borders == (("vision", 10.3), ("training", 12.0), ("update", 13.0))
    # a record without a time begins with its first work
    assert step_phases(record(wall_s=0.0), SPANS).start_s == 10.2
    assert step_phases(record(epoch=6), SPANS) is None


async def test_a_part_of_the_samples_has_a_value_at_both_ends(drive, tmp_path):
    series = MemorySeries()
    drive.hold_own(LEARNER, 1)
    for second in range(9, 15):
        series.add(float(second), ledger_of(drive))
        if second == 9:
            drive.hold_own(LEARNER, 0)
        else:
            drive.lease(ENCODER, LEARNER, name="policy.prefix_kv")
    assert series.totals[0] == GPU_PAGE
    part = series.between(10.5, 13.5)
    assert part.start_s == 10.5
    assert part.times_s == [0.0, 0.5, 1.5, 2.5, 3.0]
    assert part.totals == [size * GPU_PAGE for size in (0, 1, 2, 3, 3)]
    assert part.classes == {"policy.prefix_kv": part.totals}
    with pytest.raises(ValueError, match="before the first sample"):
        series.between(8.5, 9.5)

    draw_memory(part, tmp_path / "plain.png")
    phases = replace(step_phases(record(), SPANS), start_s=10.5)
    draw_memory(part, tmp_path / "step.png", step=phases)
    plain, marked = (np.asarray(Image.open(tmp_path / f"{name}.png")) for name in ("plain", "step"))
    # within the axes, which lie in the same place: the shade, the borders and their names
    assert plain.shape == marked.shape
    assert (plain != marked).any(axis=-1)[100:].mean() > 0.02


async def test_sampling_goes_on_until_the_block_ends(drive):
    asked = asyncio.Event()
    count = 0

    async def ask():
        nonlocal count
        count += 1
        if count == 3:
            asked.set()
        return ledger_of(drive)

    async with sampled_memory(ask, every_s=0.0) as series:
        await asked.wait()
    taken = len(series.times_s)
    assert taken >= 2
    await asyncio.sleep(0)
    assert len(series.times_s) == taken


async def test_what_asking_raises_is_raised_when_the_block_ends():
    async def ask():
        raise Unavailable("no broker")

    with pytest.raises(Unavailable, match="no broker"):
        async with sampled_memory(ask):
            await asyncio.sleep(0)
