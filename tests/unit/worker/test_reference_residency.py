"""Where the reference's weights may leave their device, by recipe and budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.ids import Participant, RunId, Service
from common.step.place import Place
from common.tensors.spec import Residency
from common.vlm.initialise import initialise, load_spec
from common.weights.layout import TensorSpec, WeightLayout
from common.worker.context import RunContext
from common.worker.reference_residency import (
    budget_is_short,
    reference_residency,
    spilled_bytes,
)
from common.worker.weights import policy_layout
from tests.integration.broker.conftest import ARENA_BYTES
from tests.integration.runs.conftest import SPEC
from tests.integration.runs.recipes import recipe

REFERENCE = Participant(service=Service.REFERENCE)
GIB = 2**30
ELEMENTS = GIB
POLICY = WeightLayout.build(
    [
        TensorSpec(name="matrix", shape=(ELEMENTS // 2,), trainable=True, decay=True),
        TensorSpec(name="tower", shape=(ELEMENTS // 2,), trainable=False, decay=False),
    ],
    dtype="bfloat16",
)
WEIGHTS = WeightLayout.build(
    [TensorSpec(name="matrix", shape=(ELEMENTS,), trainable=False, decay=False)], dtype="bfloat16"
)
RESERVE_GIB = 16
STORAGES_GIB = 2 + 2 + 6 + 2
"""Policy, gradients, masters and moments, reference."""


def context(device, *, broker=None, path=Path("model"), **training):
    return RunContext(
        run_id=RunId("run"),
        recipe=recipe(path, model={"dtype": "bfloat16"}, training=training),
        run_dir=Path("runs"),
        participant=REFERENCE,
        device=torch.device(device),
        broker=broker,
        ledger=None,
        resume_from=None,
    )


@pytest.mark.parametrize(
    ("capacity_gib", "copies_gib", "training", "short"),
    [
        (STORAGES_GIB + RESERVE_GIB, 100, {}, False),
        (STORAGES_GIB + RESERVE_GIB - 0.01, 100, {}, True),
        (20, 100, {"graph_reserve_gib": 8}, False),
        # The copies of the reference and of the optimizer's state have to fit, both of them.
        (20, 8, {}, True),
        (20, 7.99, {}, False),
        (20, 2, {"spill_optimizer": False}, True),
        (20, 0, {"spill_optimizer": False}, False),
    ],
)
def test_the_budget_is_short_where_the_room_would_be_missing(
    capacity_gib, copies_gib, training, short
):
    found = budget_is_short(
        context("cuda", **training),
        POLICY,
        WEIGHTS,
        capacity_bytes=int(capacity_gib * GIB),
        copies_bytes=int(copies_gib * GIB),
    )
    assert found is short


@pytest.mark.parametrize(
    ("capacity_gib", "copies_gib", "short"),
    [
        (STORAGES_GIB + RESERVE_GIB, 100, False),
        (STORAGES_GIB + RESERVE_GIB - 0.01, 100, True),
        (20, 16, True),
        (20, 15.99, False),
    ],
)
def test_ranks_have_a_gpu_each_and_share_the_host(capacity_gib, copies_gib, short):
    found = budget_is_short(
        replace(context("cuda"), place=Place(degree=2)),
        POLICY,
        WEIGHTS,
        capacity_bytes=int(capacity_gib * GIB),
        copies_bytes=int(copies_gib * GIB),
    )
    assert found is short


@pytest.mark.parametrize(
    ("wanted", "device", "residency"),
    [
        ("auto", "cpu", Residency.PINNED),
        (True, "cpu", Residency.SPILLABLE),
        (True, "cuda", Residency.SPILLABLE),
        (False, "cuda", Residency.PINNED),
    ],
)
def test_a_recipe_that_says_it_and_a_cpu_need_no_budget(wanted, device, residency):
    assert reference_residency(context(device, spill_reference=wanted), WEIGHTS) is residency


@pytest.mark.parametrize(
    ("reserve_gib", "residency"), [(0, Residency.PINNED), (16, Residency.SPILLABLE)]
)
async def test_by_default_a_gpu_with_a_short_budget_spills(
    broker, tmp_path, reserve_gib, residency
):
    """The broker's budget of 64 MiB holds the tiny model's storages, and no 16 GiB beside them."""
    initialise(load_spec(SPEC), tmp_path / "tiny")
    client = await broker.join(REFERENCE)
    assert (client.capacity_bytes, client.device) == (ARENA_BYTES, "cpu")
    assert client.copies_bytes == broker.deployment.spill_bytes
    wanted = context("cuda", broker=client, path=tmp_path / "tiny", graph_reserve_gib=reserve_gib)
    layout = policy_layout(wanted)
    assert reference_residency(wanted, layout) is residency
    weights_bytes = layout.total_elements * wanted.dtype.itemsize
    assert spilled_bytes(wanted, layout, layout) == weights_bytes
    too_large = replace(WEIGHTS, total_elements=client.copies_bytes)
    assert spilled_bytes(wanted, layout, too_large) == 0
    on_cpu = replace(wanted, device=torch.device("cpu"))
    fits_one = replace(WEIGHTS, total_elements=client.copies_bytes // wanted.dtype.itemsize)
    assert spilled_bytes(on_cpu, layout, fits_one) > 0
    assert spilled_bytes(replace(on_cpu, place=Place(degree=2)), layout, fits_one) == 0
