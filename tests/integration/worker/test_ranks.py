"""Ranks of one service find each other, agree, and can do so again after they have parted."""

from __future__ import annotations

import json

import pytest

from tests.integration.ranks import run_ranks
from tests.integration.worker.rank import DEGREE

LIMIT_S = 120.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 30)]


def test_ranks_join_agree_and_join_again(tmp_path):
    run_ranks("tests.integration.worker.rank", tmp_path, world=DEGREE, limit_s=LIMIT_S)
    expected = {
        "replicas": False,
        "total": 3,
        "agree": [True, False],
        "configured": 3,
        "all_true": [True, False],
        "all_equal": [True, False],
        "left_behind": False,
    }
    for rank in range(DEGREE):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [expected] * 2
