"""Replicas sum their gradients and collect their weights, whatever the sizes."""

from __future__ import annotations

import json
import math

import pytest
import torch

from common.weights.cuts import shares
from tests.integration.learner.rank import SIZES, layout_of
from tests.integration.ranks import run_ranks

LIMIT_S = 120.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 30)]


@pytest.mark.parametrize(("replicas", "degree"), [(2, 1), (3, 1), (2, 2)])
def test_replicas_meet(tmp_path, replicas, degree):
    run_ranks(
        "tests.integration.learner.rank",
        tmp_path,
        *map(str, (degree, replicas)),
        world=replicas * degree,
        limit_s=LIMIT_S,
    )
    for rank in range(replicas * degree):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        replica, tensor = divmod(rank, degree)
        assert (seen["replica"], seen["tensor"] or 0) == (replica, tensor)
        assert seen["all_true"] == [True, False]
        assert seen["agree"] == [True, replica != 0]
        assert seen["everyones"] == [[one, one / 4] for one in range(replicas * degree)]
        # The ranks with the same part of the model are `degree` apart.
        factor = sum(other * degree + tensor + 1 for other in range(replicas))
        for size in SIZES:
            found = seen[str(size)]
            ranges = shares(size, replicas)
            own = ranges[replica]
            whole = (torch.arange(size) + 1.0) * factor
            assert found["own"] == [own.start, own.stop]
            assert found["summed"] == whole[own].tolist()
            assert found["in_place"]
            assert found["gathered"][:size] == [
                float(number) for number, one in enumerate(ranges) for _ in range(size)[one]
            ]
            assert found["gathered"][size:] == [-1.0] * 3
            counted = [
                whole[entry.offset_elements :][: entry.numel]
                for entry in layout_of(size).trainable_entries
            ]
            assert found["norm"] == pytest.approx(
                math.sqrt(sum(float((one.double() ** 2).sum()) for one in counted)), rel=1e-12
            )
