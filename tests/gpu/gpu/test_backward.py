"""A backward on another stream than its forward."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from common.gpu.backward import backward_on_current_stream
from common.gpu.green_streams import GreenStreams

pytestmark = pytest.mark.gpu


class _Square(torch.autograd.Function):
    """Notes the stream of its backward."""

    seen: ClassVar[list[torch.cuda.Stream]] = []

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx, gradient):
        _Square.seen.append(torch.cuda.current_stream())
        (value,) = ctx.saved_tensors
        return 2 * value * gradient


def _forward(weights: torch.Tensor) -> torch.Tensor:
    """Residuals, so that gradients are added up between nodes."""
    hidden = weights
    for _ in range(6):
        hidden = hidden + _Square.apply((hidden @ weights).tanh()) * 0.1
    return hidden


@pytest.mark.parametrize("moved", [False, True])
def test_the_gradient_is_that_of_one_stream(moved: bool) -> None:
    total = torch.cuda.get_device_properties(0).multi_processor_count
    stream = GreenStreams(0, [total // 2]).stream(total // 2)
    torch.manual_seed(0)
    weights = torch.randn(1024, 1024, device="cuda").mul_(0.03).requires_grad_()
    expected = torch.autograd.grad(_forward(weights).sum(), weights)[0]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        output = _forward(weights)
        stream.synchronize()
    _Square.seen.clear()
    if moved:
        backward_on_current_stream([output])
    torch.autograd.backward([output], [torch.ones_like(output)])
    torch.cuda.synchronize()
    here = torch.cuda.current_stream()
    assert _Square.seen == [here if moved else stream] * 6
    torch.testing.assert_close(weights.grad, expected, rtol=1e-4, atol=1e-4)
