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
from common.vlm.shape import shape_of
from common.vlm.tiny import tiny_config
from common.weights.binding import views
from common.weights.errors import LayoutMismatch, MissingWeight, UnexpectedWeight
from services.rollout.engines.sglang.placement import place


def engine_parameters(shape) -> dict[str, torch.Tensor]:
    """Parameters with SGLang's names and shapes."""
    _, rollout = layout_pair(shape, ("native", 1), ("sglang", 1))
    found = {}
    for tensor in rollout.ranks[0]:
        for layer in range(tensor.count):
            parameter = torch.zeros(tensor.shape)
            for name in tensor.layer_names(layer):
                engine_name = on_disk_name(name).replace(".attn.qkv.", ".attn.qkv_proj.")
                found[engine_name] = parameter
    return found


def policy(
    *,
    vocabulary: int = 384,
    train_vision: bool = False,
    tied: bool = False,
    vision_inner: int | None = None,
):
    config = tiny_config(vocab_size=vocabulary, tie_word_embeddings=tied)
    if vision_inner is not None:
        config.vision_config.intermediate_size = vision_inner
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
    ("train_vision", "vocabulary", "vision_inner", "copied"),
    [
        (True, 384, 64, set()),
        (False, 384, 64, set()),
        (False, 384, 60, {f"visual.blocks.{n}.mlp.gate_up_proj.bias" for n in range(2)}),
        (True, 200, 64, {"model.embed_tokens.weight", "lm_head.weight"}),
    ],
    ids=["trained tower", "frozen tower", "padding behind a bias", "padded vocabulary"],
)
def test_what_cannot_be_a_view(train_vision, vocabulary, vision_inner, copied):
    bound, shape = policy(
        vocabulary=vocabulary, train_vision=train_vision, vision_inner=vision_inner
    )
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
