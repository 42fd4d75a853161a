"""Fused passes and the device decoder on two ranks, a GPU each, against one rank."""

from __future__ import annotations

import pytest
import torch

from common.vlm.parallel.state import take_shard
from common.weights.binding import views
from tests.integration.ranks import run_ranks

WORLD = 2
LIMIT_S = 240.0
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.timeout(LIMIT_S + 30),
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.gpu.vlm.rank", folder, world=WORLD, limit_s=LIMIT_S)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def distance(actual, expected):
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm())


def test_logprobs_are_as_near_to_float32_as_those_of_one_rank(results):
    for result in results:
        exact, one, ranks = (result[name][0] for name in ("exact", "one", "ranks"))
        assert distance(ranks, exact) < 1.5 * distance(one, exact)
        assert torch.equal(ranks, results[0]["ranks"][0])


def test_gradients_are_as_near_to_float32_as_those_of_one_rank(results):
    for result in results:
        whole, own = result["layouts"]
        exact, one = (views(result[name][1], whole) for name in ("exact", "one"))
        for name, gradient in views(result["ranks"][1], own).items():
            part = result["parts"][name]
            expected, alone = take_shard(exact[name], part), take_shard(one[name], part)
            if float(expected.norm()) > 0:
                assert distance(gradient, expected) < 2 * distance(alone, expected) + 1e-3, name


def test_captured_collectives_give_the_tokens_of_plain_launches(results):
    for result in results:
        for launched, replayed in zip(result["launches"], result["graph"], strict=True):
            assert torch.equal(launched, replayed)
        for own, first in zip(result["graph"], results[0]["graph"], strict=True):
            assert torch.equal(own, first)


def test_logprobs_of_decoded_tokens_are_those_of_one_rank(results):
    for result in results:
        difference = (result["graph"][1] - result["one_decoded"][1]).abs()
        assert float(difference.mean()) < 0.01
        assert float(difference.max()) < 0.1
