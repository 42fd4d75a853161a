"""Ranks on a GPU each: NCCL beside Gloo, on a share of the SMs, in graphs, between services."""

from __future__ import annotations

import json

import pytest
import torch

from tests.integration.ranks import run_ranks

WORLD = 2
LIMIT_S = 150.0
SOON_S = 10.0
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.timeout(LIMIT_S + 30),
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joined")
    run_ranks("tests.gpu.worker.rank", folder, world=WORLD, limit_s=LIMIT_S)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]
    print(found)  # noqa: T201 - how long it took
    return found


def test_ranks_sum_and_agree_each_time_that_they_join(results):
    for result in results:
        for seen in result["joined"]:
            assert seen["share"] == seen["graph"] == [3.0]
            assert (seen["told"], seen["agree"], seen["left_behind"]) == (7, False, False)


def test_ranks_leave_soon(results):
    assert max(seen["leave_s"] for result in results for seen in result["joined"]) < SOON_S


def test_weights_are_pushed_and_a_closed_end_waits_for_no_more(results):
    for rank, result in enumerate(results):
        assert result["pushed"]["right"]
        assert result["pushed"]["heard"] == (5 if rank == 0 else None)
        assert result["pushed"]["broken"]
        assert result["pushed"]["close_s"] < SOON_S


def test_a_sum_that_lacks_a_rank_can_be_aborted(results):
    assert results[0]["aborted_s"] < SOON_S / 2


def test_a_process_has_a_context_on_its_own_gpu_alone(results):
    assert [result["contexts"] for result in results] == [[True, False], [False, True]]
