from __future__ import annotations

import pytest
import torch
from torch import nn

from common.weights.binding import bind_parameters, bind_tensors, views
from common.weights.errors import LayoutMismatch, MissingWeight, UnexpectedWeight
from common.weights.layout import TensorSpec, WeightLayout


class Tied(nn.Module):
    """Two linears that share a weight, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.second(self.first(self.frozen(x)))


def tied_layout(**replaced):
    shapes = {"first.weight": (4, 4), "first.bias": (4,), "frozen.weight": (4, 4), **replaced}
    specs = [
        TensorSpec(
            name=name,
            shape=shape,
            trainable=name != "frozen.weight",
            decay=name == "first.weight",
        )
        for name, shape in shapes.items()
        if shape
    ]
    return WeightLayout.build(specs, dtype="float32", aliases={"second.weight": "first.weight"})


def meta_model():
    with torch.device("meta"):
        return Tied()


def test_views_share_the_buffer():
    layout = tied_layout()
    flat = torch.zeros(layout.total_elements)
    parts = views(flat, layout)
    parts["first.bias"].fill_(3.0)
    assert flat.sum() == 12.0
    assert list(views(torch.zeros(layout.trainable_elements), layout)) == [
        "first.weight",
        "first.bias",
    ]
    assert views(flat, layout, ["second.weight"])["second.weight"].data_ptr() == flat.data_ptr()


def test_views_refuse_a_wrong_length_and_frozen_parts_of_trainable_state():
    layout = tied_layout()
    with pytest.raises(LayoutMismatch, match="does not fit"):
        views(torch.zeros(layout.total_elements + 16), layout)
    with pytest.raises(LayoutMismatch, match=r"frozen\.weight is frozen"):
        views(torch.zeros(layout.trainable_elements), layout, ["frozen.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_adds_into_the_accumulator(dtype):
    layout = tied_layout()
    flat = torch.randn(layout.total_elements, generator=torch.Generator().manual_seed(0)).to(dtype)
    gradients = torch.zeros(layout.trainable_elements)
    model = meta_model()
    bind_parameters(model, layout, flat, gradients)
    x = torch.ones(2, 4, dtype=dtype)
    model(x).sum().backward()
    once = gradients.clone()
    model(x).sum().backward()
    assert once.abs().sum() > 0
    assert torch.equal(gradients, 2 * once)
    assert model.first.weight.grad.data_ptr() == gradients.data_ptr()
    assert model.first.weight is model.second.weight
    assert model.frozen.weight.grad is None
    assert not model.frozen.weight.requires_grad
    flat.zero_()
    assert model.first.weight.abs().sum() == 0


def test_without_an_accumulator_nothing_requires_a_gradient():
    layout = tied_layout()
    model = meta_model()
    bind_parameters(model, layout, torch.zeros(layout.total_elements), None)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("replaced", "error", "message"),
    [
        ({"first.bias": None}, MissingWeight, "first.bias"),
        ({"extra": (2,)}, UnexpectedWeight, "extra"),
        ({"frozen.weight": (2, 8)}, LayoutMismatch, "frozen.weight"),
    ],
)
def test_binding_covers_exactly_the_model(replaced, error, message):
    layout = tied_layout(**replaced)
    with pytest.raises(error, match=message):
        bind_parameters(meta_model(), layout, torch.zeros(layout.total_elements), None)


def scattered(layout):
    """Each entry in memory of its own."""
    return {one.name: torch.zeros(one.shape) for one in layout.entries}


def test_parameters_may_lie_anywhere():
    layout, model = tied_layout(), meta_model()
    weights = scattered(layout)
    strided = torch.zeros(weights["frozen.weight"].shape[::-1]).t()
    weights["frozen.weight"] = strided
    bind_tensors(model, layout, weights | {"of another model": torch.zeros(1)}, {})
    assert model.first.weight is model.second.weight
    assert not any(p.requires_grad for p in model.parameters())
    strided.add_(1)
    assert model.frozen.weight.min() == 1


def test_parameters_that_were_given_no_tensor_are_named():
    layout = tied_layout()
    weights = scattered(layout)
    gone = ["first.bias", "frozen.weight"]
    for name in gone:
        del weights[name]
    with pytest.raises(MissingWeight) as raised:
        bind_tensors(meta_model(), layout, weights, {})
    assert raised.value.data["names"] == gone
