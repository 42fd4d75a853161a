"""What sums over ranks by itself, against the whole on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from tests.integration.parallel.local_rank import (
    INNER,
    KV_PARTS,
    ROWS,
    VOCABULARY,
    WIDTH,
    ids,
    parameter,
    part,
    whole,
)
from tests.integration.parallel.world import WORLD
from tests.integration.ranks import run_ranks

LIMIT_S = 240.0
pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.integration.parallel.local_rank", folder, world=WORLD, limit_s=LIMIT_S)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize(("name", "before"), [("embedding", 0), ("accumulated", 1)])
def test_embeddings_of_a_range_of_rows(results, name, before):
    table = parameter(whole(VOCABULARY, WIDTH, seed=0))
    expected = F.embedding(ids(), table)
    (expected * whole(ROWS, WIDTH, seed=1)).sum().backward()
    for rank, result in enumerate(results):
        out, gradient = result[name]
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(gradient, part(table.grad, rank) + before)


def test_projections_by_outputs_and_by_inputs(results):
    whole_parameters = [
        parameter(whole(*shape, seed=seed))
        for shape, seed in (
            ((INNER, WIDTH), 2),
            ((INNER,), 3),
            ((WIDTH, INNER), 4),
            ((WIDTH,), 5),
            ((ROWS, WIDTH), 6),
        )
    ]
    first_w, first_b, second_w, second_b, inputs = whole_parameters
    expected = F.linear(torch.tanh(F.linear(inputs, first_w, first_b)), second_w, second_b)
    (expected * whole(ROWS, WIDTH, seed=7)).sum().backward()
    for rank, result in enumerate(results):
        out, gradients = result["pair"]
        torch.testing.assert_close(out, expected.detach())
        for gradient, of, axis in zip(
            gradients, whole_parameters, (0, 0, 1, None, None), strict=True
        ):
            slice_of = of.grad if axis is None else part(of.grad, rank, axis=axis)
            torch.testing.assert_close(gradient, slice_of)


def test_gradients_of_shared_projections_are_sums_over_those_that_share_them(results):
    inputs = whole(ROWS, WIDTH, seed=20).float()
    sharing = WORLD // KV_PARTS
    for rank, result in enumerate(results):
        first = rank // sharing * sharing
        outputs = sum(whole(ROWS, 2, seed=10 + r).float() for r in range(first, first + sharing))
        of_weight, of_bias, accumulator = result["shared"]
        torch.testing.assert_close(of_weight, outputs.t() @ inputs)
        assert of_bias is None
        torch.testing.assert_close(accumulator, 1 + outputs.sum(0))


def test_frozen_shared_projections_have_no_gradients(results):
    for result in results:
        of_weight, of_bias, accumulator = result["frozen"]
        assert of_weight is None
        assert of_bias is None
        assert (accumulator == 1).all()


def test_parts_are_gathered_in_the_order_of_the_ranks(results):
    for result in results:
        for rank in range(WORLD):
            assert (result["gathered"][rank] == rank).all()
