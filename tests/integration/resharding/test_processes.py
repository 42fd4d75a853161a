from __future__ import annotations

import json

import pytest

from tests.integration.ranks import run_ranks
from tests.integration.resharding.cases import CASES, WORLD

LIMIT_S = 200.0
pytestmark = [pytest.mark.timeout(LIMIT_S + 30), pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where four ranks have written how each case went."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.integration.resharding.rank", folder, world=WORLD, limit_s=LIMIT_S)
    return folder


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_process_has_its_shards_after_two_updates(folder, number):
    plan = CASES[number].plan
    for rank, gpu in enumerate(plan.gpus):
        done = json.loads((folder / f"{number}-{rank}.json").read_text())
        assert "error" not in done, done["error"]
        assert done["version"] == 2
        moved = (done["alias_bytes"], done["gather_bytes"], done["rebuild_bytes"])
        assert moved == (gpu.alias_bytes, gpu.gather_bytes, gpu.rebuild_copied_bytes)


def test_the_cases_have_every_kind_of_work():
    plans = [case.plan for case in CASES]
    assert any(gpu.gather_bytes and not gpu.rebuild_bytes for p in plans for gpu in p.gpus)
    assert any(gpu.rebuild_bytes for p in plans for gpu in p.gpus)
    assert any(not gpu.gather_bytes + gpu.rebuild_bytes for p in plans for gpu in p.gpus)
    assert {gpu.train_rank for gpu in plans[0].gpus} == {0}
