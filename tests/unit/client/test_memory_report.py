"""The ledger as clients see it: series, groups, the picture."""

from __future__ import annotations

import io

import pytest
from matplotlib.figure import Figure
from PIL import Image

from rollplex.cli.memory_tables import size
from rollplex.ledger import ledger_from_proto
from rollplex.report.memory import MemorySeries, draw_memory, sample_memory
from services.broker.translate import ledger_to_proto
from tests.unit.broker.driver import ENCODER, GPU, GPU_PAGE, LEARNER, Driver


@pytest.fixture(scope="module", autouse=True)
def fonts():
    """matplotlib keeps the font files of its first drawing open: that is no leak of a test's."""
    figure = Figure()
    figure.add_subplot().set_title("text")
    figure.savefig(io.BytesIO(), format="png")


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
