"""Steps whose gradient is NaN or infinite are counted, over restarts too."""

from __future__ import annotations

import math

import pytest

from common.ids import Epoch, WeightsVersion
from common.registry.runs import DurableRecord
from common.rl.optimizer import UpdateReport
from services.learner.errors import TooManyNonFinite
from services.learner.nonfinite import NONFINITE, nonfinite_after, recorded_nonfinite

LIMIT = 3


def report(norm):
    return UpdateReport(
        applied=math.isfinite(norm), gradient_norm=norm, clipped=False, learning_rate=1e-3
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_as_many_in_a_row_as_the_limit_stop_the_run(bad):
    counted = [0]
    for norm in (bad, bad, 1.0, bad, bad):
        counted.append(nonfinite_after(report(norm), counted[-1], limit=LIMIT))
    assert counted == [0, 1, 2, 0, 1, 2]
    with pytest.raises(TooManyNonFinite, match=r"3 steps in a row \(algorithm.nonfinite_limit\)"):
        nonfinite_after(report(bad), counted[-1], limit=LIMIT)


def test_a_step_without_a_gradient_ends_the_row():
    assert nonfinite_after(None, 2, limit=LIMIT) == 0


def record(kind, version, metrics):
    return DurableRecord(
        kind=kind, version=WeightsVersion(version), location="x", epoch=Epoch(1), metrics=metrics
    )


def test_whoever_restores_a_version_has_its_number():
    records = [
        record("checkpoint", 5, {}),
        record("shadow", 5, {NONFINITE: 2.0, "loss": 1.0}),
        record("checkpoint", 3, {}),
    ]
    assert [recorded_nonfinite(records, WeightsVersion(one)) for one in (3, 4, 5)] == [0, 0, 2]
