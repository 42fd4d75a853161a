from __future__ import annotations

import pytest
import torch

from common.vlm.bound import bound_model
from common.vlm.checkpoint import load_checkpoint
from common.vlm.parallel.state import put_shard, take_shard
from common.weights.binding import views
from tests.integration.parallel.scenarios import ALGORITHM, SCENARIOS
from tests.integration.parallel.world import DEGREES, WORLD
from tests.integration.ranks import run_ranks

LIMIT_S = 300.0
pytestmark = [pytest.mark.timeout(LIMIT_S + 30), pytest.mark.slow]
PARALLEL = [degree for degree in DEGREES if degree > 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where four ranks have saved what they computed."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.integration.parallel.rank", folder, world=WORLD, limit_s=LIMIT_S)
    return folder


@pytest.fixture(params=range(len(SCENARIOS)), ids=list(SCENARIOS), scope="module")
def number(request):
    return request.param


@pytest.fixture
def scenario(number):
    return list(SCENARIOS.values())[number]


@pytest.fixture
def load(folder, number):
    def read(stage, degree):
        return [
            torch.load(folder / f"{stage}-{number}-{degree}-{rank}.pt", weights_only=False)
            for rank in range(degree)
        ]

    return read


def assert_near(actual, expected, scenario, name=""):
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    difference = float((actual - expected).abs().max()) if expected.numel() else 0.0
    assert difference <= scenario.tolerance * scale, (name, difference, scale)


@pytest.mark.parametrize("degree", PARALLEL)
def test_every_rank_has_its_heads_of_the_prefix(load, scenario, degree):
    (whole,) = load("trained", 1)
    for rank, result in enumerate(load("trained", degree)):
        for own, all_heads in zip(result["prefixes"], whole["prefixes"], strict=True):
            heads, kv_heads = own.shape[2], all_heads.shape[2]
            assert heads == max(1, kv_heads // degree)
            first = rank * kv_heads // degree
            assert_near(own, all_heads[:, :, first : first + heads], scenario)


@pytest.mark.parametrize("degree", PARALLEL)
def test_responses_score_alike_on_all_ranks(load, scenario, degree):
    (whole,) = load("trained", 1)
    results = load("trained", degree)
    for result in results:
        for own, expected, first in zip(
            result["logprobs"], whole["logprobs"], results[0]["logprobs"], strict=True
        ):
            assert expected.numel() > 0
            assert_near(own, expected, scenario)
            assert torch.equal(own, first)


@pytest.mark.parametrize("degree", PARALLEL)
def test_a_shards_gradient_is_the_slice_of_the_whole_one(load, scenario, degree):
    (whole,) = load("trained", 1)
    for result in load("trained", degree):
        assert result["gradients"].keys() == whole["gradients"].keys()
        for name, (part, own) in result["gradients"].items():
            expected = take_shard(whole["gradients"][name][1], part)
            assert_near(own, expected, scenario, name)


@pytest.mark.parametrize("degree", PARALLEL)
def test_the_update_is_the_one_of_a_single_rank(load, scenario, degree):
    (whole,) = load("trained", 1)
    assert whole["norm"] > ALGORITHM.max_grad_norm
    results = load("trained", degree)
    rebuilt = {name: torch.full_like(v, float("nan")) for name, (_, v) in whole["weights"].items()}
    for result in results:
        assert result["norm"] == pytest.approx(whole["norm"], rel=scenario.tolerance)
        assert result["norm"] == results[0]["norm"]
        for name, (part, own) in result["weights"].items():
            put_shard(rebuilt[name], part, own)
    for name, (_, expected) in whole["weights"].items():
        assert_near(rebuilt[name], expected, scenario, name)


@pytest.mark.parametrize("degree", PARALLEL)
def test_ranks_that_hold_the_same_part_keep_the_same_bits(load, degree):
    results = load("trained", degree)
    copies = 0
    for result in results:
        for name, (part, own) in result["weights"].items():
            first = part.holders[0]
            copies += len(part.holders) > 1
            assert torch.equal(own, results[first]["weights"][name][1]), name
    assert copies > 0


def test_a_checkpoint_of_shards_is_one_of_the_whole_model(folder, load, number, scenario):
    for degree in DEGREES:
        bound = bound_model(scenario.config, dtype=scenario.dtype, train_vision=True)
        tensors = views(bound.weights, bound.layout)
        load_checkpoint(folder / f"model-{number}-{degree}", bound.layout, tensors)
        for result in load("trained", degree):
            for name, (part, own) in result["weights"].items():
                assert torch.equal(take_shard(tensors[name], part), own), name


@pytest.mark.parametrize("degree", PARALLEL)
def test_ranks_talk_as_often_as_the_page_says(load, scenario, degree):
    text = scenario.config.text_config
    shared = 4 * text.num_hidden_layers if degree > text.num_key_value_heads else 0
    # of the last layer a prefix needs keys and values only
    forward = 1 + 2 * (text.num_hidden_layers - 1)
    backward = 1 + 2 * (text.num_hidden_layers - 1) + shared
    for result in load("trained", degree):
        assert result["collectives"] == [forward, backward]
    assert load("trained", 1)[0]["collectives"] == [0, 0]


@pytest.mark.parametrize("degree", PARALLEL)
def test_two_streams_with_a_mesh_each_run_beside_each_other(load, degree):
    for result in load("trained", degree):
        for buffers in result["beside"]:
            for own, alone in zip(buffers, result["prefixes"], strict=True):
                assert torch.equal(own, alone)


@pytest.mark.parametrize("way", ["greedy", "sampled"])
@pytest.mark.parametrize("degree", PARALLEL)
def test_every_rank_samples_the_tokens_of_a_single_rank(load, scenario, degree, way):
    (whole,) = load("rolled", 1)
    for result in load("rolled", degree):
        for group, (tokens, lengths, logprobs) in whole[way].items():
            own_tokens, own_lengths, own_logprobs = result[way][group]
            assert torch.equal(own_tokens, tokens)
            assert torch.equal(own_lengths, lengths)
            torch.testing.assert_close(own_logprobs, logprobs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("degree", PARALLEL)
def test_weights_trained_at_one_degree_score_alike_at_another(load, scenario, degree):
    (whole,) = load("rolled", 1)
    for result in load("rolled", degree):
        for own, expected in zip(result["logprobs"], whole["logprobs"], strict=True):
            assert_near(own, expected, scenario)
