"""Fused steps over ranks against fused steps of one rank, with Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from common.vlm.parallel.state import take_shard
from tests.integration.parallel.scenarios import FUSED
from tests.integration.parallel.test_degrees import assert_near
from tests.integration.parallel.world import DEGREES, WORLD
from tests.integration.ranks import run_ranks

pytest.importorskip("triton", reason="Triton is not installed")
LIMIT_S = 600.0
pytestmark = [
    pytest.mark.timeout(LIMIT_S + 30),
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs TRITON_INTERPRET=1 from the start of the process",
    ),
]
PARALLEL = [degree for degree in DEGREES if degree > 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where four ranks have saved what they computed."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.integration.parallel.fused_rank", folder, world=WORLD, limit_s=LIMIT_S)
    return folder


@pytest.fixture(params=range(len(FUSED)), ids=list(FUSED), scope="module")
def number(request):
    return request.param


@pytest.fixture
def scenario(number):
    return list(FUSED.values())[number]


@pytest.fixture
def load(folder, number):
    def read(degree):
        return [
            torch.load(folder / f"fused-{number}-{degree}-{rank}.pt", weights_only=False)
            for rank in range(degree)
        ]

    return read


@pytest.mark.parametrize("degree", PARALLEL)
def test_every_rank_has_its_heads_of_the_prefix(load, scenario, degree):
    (whole,) = load(1)
    for rank, result in enumerate(load(degree)):
        for own, all_heads in zip(result["prefixes"], whole["prefixes"], strict=True):
            heads, kv_heads = own.shape[2], all_heads.shape[2]
            assert heads == max(1, kv_heads // degree)
            first = rank * kv_heads // degree
            assert_near(own, all_heads[:, :, first : first + heads], scenario)


@pytest.mark.parametrize("degree", PARALLEL)
def test_responses_score_alike_on_all_ranks(load, scenario, degree):
    (whole,) = load(1)
    results = load(degree)
    for result in results:
        for own, expected, first in zip(
            result["logprobs"], whole["logprobs"], results[0]["logprobs"], strict=True
        ):
            assert expected.numel() > 0
            assert_near(own, expected, scenario)
            assert torch.equal(own, first)


@pytest.mark.parametrize("degree", PARALLEL)
def test_a_shards_gradient_is_the_slice_of_the_whole_one(load, scenario, degree):
    (whole,) = load(1)
    results = load(degree)
    for result in results:
        assert result["gradients"].keys() == whole["gradients"].keys()
        for name, (part, own) in result["gradients"].items():
            assert_near(own, take_shard(whole["gradients"][name][1], part), scenario, name)
            first = results[part.holders[0]]["gradients"][name][1]
            assert torch.equal(own, first), name


@pytest.mark.parametrize("degree", PARALLEL)
def test_ranks_talk_as_often_as_the_page_says(load, scenario, degree):
    text = scenario.config.text_config
    shared = text.num_hidden_layers if degree > text.num_key_value_heads else 0
    # of the last layer a prefix needs keys and values only
    sums = 1 + 2 * (text.num_hidden_layers - 1)
    for result in load(degree):
        assert result["collectives"] == [sums, sums + shared]
    assert load(1)[0]["collectives"] == [0, 0]


@pytest.mark.parametrize("way", ["greedy", "sampled", "truncated"])
@pytest.mark.parametrize("degree", PARALLEL)
def test_every_rank_samples_the_tokens_of_a_single_rank(load, degree, way):
    (whole,) = load(1)
    for result in load(degree):
        for group, (tokens, lengths, logprobs) in whole[way].items():
            own_tokens, own_lengths, own_logprobs = result[way][group]
            assert torch.equal(own_tokens, tokens)
            assert torch.equal(own_lengths, lengths)
            torch.testing.assert_close(own_logprobs, logprobs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("degree", PARALLEL)
def test_kernels_are_chosen_as_on_one_rank(load, degree):
    for result in load(degree):
        assert result["chosen"] == [degree, None]
