"""The order of samples is a pure function of seed and step."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.data.order import step_samples
from common.errors import InvalidArgument


def test_the_order_never_changes_between_versions():
    assert step_samples(seed=3, step=0, prompts_per_step=5, dataset_rows=7) == (6, 1, 5, 2, 4)
    assert step_samples(seed=3, step=1, prompts_per_step=5, dataset_rows=7) == (3, 0, 3, 5, 6)


@given(
    seed=st.integers(0, 2**63),
    rows=st.integers(1, 40),
    prompts=st.integers(1, 50),
    passes=st.integers(1, 3),
)
def test_each_pass_visits_every_row_once(seed, rows, prompts, passes):
    steps = -(-rows * passes // prompts)
    flat = [
        sample
        for step in range(steps)
        for sample in step_samples(
            seed=seed, step=step, prompts_per_step=prompts, dataset_rows=rows
        )
    ]
    for start in range(0, rows * passes, rows):
        assert sorted(flat[start : start + rows]) == list(range(rows))


def test_seed_and_pass_change_the_order():
    orders = {
        step_samples(seed=seed, step=step, prompts_per_step=64, dataset_rows=64)
        for seed in range(3)
        for step in range(3)
    }
    assert len(orders) == 9


@pytest.mark.parametrize(
    "change", [{"dataset_rows": 0}, {"prompts_per_step": 0}, {"step": -1}, {"seed": -1}]
)
def test_sizes_out_of_range_are_refused(change):
    arguments = {"seed": 0, "step": 0, "prompts_per_step": 1, "dataset_rows": 1} | change
    with pytest.raises(InvalidArgument, match="must be 1 or more"):
        step_samples(**arguments)


def test_the_control_plane_can_import_it_without_torch():
    code = "import sys, common.data.order; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
