"""Where the engine's parameters lie in the policy's weights, without SGLang.

Shapes: E elements of the layout.
"""

from __future__ import annotations

import pytest
import torch

from common.layouts.model import layout_pair
from common.vlm.bound import bound_model
from common.vlm.loading import weight_layout
from common.vlm.names import on_disk_name
from common.vlm.parallel.shards import rank_layout, shards
from common.vlm.shape import shape_of
from common.vlm.tiny import tiny_config
from common.weights.binding import views
from common.weights.errors import LayoutMismatch, MissingWeight, UnexpectedWeight
from services.rollout.engines.sglang.placement import place


def engine_parameters(shape, rank: int = 0, ranks: int = 1) -> dict[str, torch.Tensor]:
    """Parameters of a rank with SGLang's names and shapes."""
    _, rollout = layout_pair(shape, ("native", ranks), ("sglang", ranks))
    found = {}
    for tensor in rollout.ranks[rank]:
        for layer in range(tensor.count):
            parameter = torch.zeros(tensor.shape)
            for name in map(on_disk_name, tensor.layer_names(layer)):
                if not name.startswith("visual."):
                    found[name] = parameter
    return found


def policy(*, vocabulary: int = 384, train_vision: bool = False, tied: bool = False):
    config = tiny_config(vocab_size=vocabulary, tie_word_embeddings=tied)
    bound = bound_model(config, dtype=torch.float32, train_vision=train_vision)
    return bound, shape_of(config.to_dict(), name="tiny")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("train_vision", [False, True])
@pytest.mark.parametrize("vocabulary", [384, 200])
def test_every_parameter_gets_its_parts(vocabulary, train_vision, tied):
    bound, shape = policy(vocabulary=vocabulary, train_vision=train_vision, tied=tied)
    parameters = engine_parameters(shape)
    placed = place(parameters, bound.layout, shape)
    assert [one.name for one in placed] == list(parameters)
    parts = views(bound.weights, bound.layout)
    for one in placed:
        parameter = parameters[one.name]
        one.copy(bound.weights, parameter)
        expected = torch.cat([parts[entry.name].reshape(-1) for entry in one.entries])
        assert torch.equal(parameter.reshape(-1)[: expected.numel()], expected)
        if one.alias:
            view = one.view(bound.weights, parameter)
            assert torch.equal(view, parameter)
            first = bound.weights[one.entries[0].offset_elements :]
            assert view.data_ptr() == first.data_ptr()


@pytest.mark.parametrize(
    ("train_vision", "vocabulary", "copied"),
    [
        (True, 384, set()),
        (False, 384, set()),
        (True, 200, {"model.embed_tokens.weight", "lm_head.weight"}),
    ],
    ids=["trained tower", "frozen tower", "padded vocabulary"],
)
def test_what_cannot_be_a_view(train_vision, vocabulary, copied):
    bound, shape = policy(vocabulary=vocabulary, train_vision=train_vision)
    placed = place(engine_parameters(shape), bound.layout, shape)
    assert {one.name for one in placed if not one.alias} == copied


def test_parameters_and_weights_without_a_counterpart_are_named():
    bound, shape = policy()
    parameters = engine_parameters(shape)
    stranger = {**parameters, "model.layers.0.router.weight": torch.zeros(1)}
    with pytest.raises(MissingWeight, match=r"model\.layers\.0\.router\.weight"):
        place(stranger, bound.layout, shape)
    del parameters["model.norm.weight"]
    with pytest.raises(UnexpectedWeight, match=r"language_model\.norm\.weight"):
        place(parameters, bound.layout, shape)


def test_another_dtype_or_size_is_refused():
    bound, shape = policy()
    parameters = engine_parameters(shape)
    halves = weight_layout(bound.model, train_vision=False, dtype=torch.bfloat16)
    with pytest.raises(LayoutMismatch, match=r"torch\.float32 in the engine and bfloat16"):
        place(parameters, halves, shape)
    with pytest.raises(LayoutMismatch, match=r"model\.norm\.weight has 63 elements"):
        place({**parameters, "model.norm.weight": torch.zeros(63)}, bound.layout, shape)


@pytest.mark.parametrize("ranks", [2, 4], ids=["two ranks", "heads that two of four share"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_reads_its_part_in_place(ranks, tied):
    bound, shape = policy(vocabulary=512, tied=tied)
    for rank in range(ranks):
        parts = shards(bound.layout, shape, rank=rank, degree=ranks)
        layout = rank_layout(bound.layout, parts, rank=rank, degree=ranks)
        parameters = engine_parameters(shape, rank, ranks)
        placed = place(parameters, layout, shape, ranks=ranks)
        assert [one.name for one in placed] == list(parameters)
        assert all(one.alias for one in placed)
        flat = torch.arange(float(layout.total_elements))
        for one in placed:
            assert one.view(flat, parameters[one.name]).shape == parameters[one.name].shape


def test_several_ranks_have_no_padded_table():
    """The rows of SGLang's ranks would be others than those of the policy's."""
    bound, shape = policy(vocabulary=200)
    parts = shards(bound.layout, shape, rank=0, degree=2)
    layout = rank_layout(bound.layout, parts, rank=0, degree=2)
    with pytest.raises(LayoutMismatch, match=r"model\.embed_tokens\.weight has .* in the engine"):
        place(engine_parameters(shape, 0, 2), layout, shape, ranks=2)
