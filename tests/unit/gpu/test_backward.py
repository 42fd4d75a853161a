from __future__ import annotations

import torch

from common.gpu.backward import around_backward, backward_on_current_stream


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append("double")
        return gradient * 2


def test_every_node_but_the_parameters_is_entered_and_left_once():
    weight = torch.ones(3, requires_grad=True)
    hidden = _Double.apply(weight)
    log = hidden.grad_fn.log = []
    outputs = [hidden * 3, hidden + 1]

    def enter():
        log.append("enter")
        return len(log)

    around_backward(outputs, enter, lambda at: log.append(("leave", at)))
    torch.autograd.backward(outputs, [torch.ones(3), torch.ones(3)])
    assert torch.equal(weight.grad, torch.full((3,), 8.0))
    assert log.count("enter") == 3
    assert log.index("double") == len(log) - 2
    assert log[-3] == "enter"
    assert [entry for entry in log if entry[0] == "leave"] == [
        ("leave", at + 1) for at, entry in enumerate(log) if entry == "enter"
    ]


def test_parameters_keep_no_hook():
    weight = torch.ones(3, requires_grad=True)
    calls = []
    for _ in range(2):
        output = weight * 2
        around_backward([output], lambda: calls.append("enter"), lambda _: calls.append("leave"))
        output.sum().backward()
    assert calls == ["enter", "leave"] * 2


def test_outputs_without_a_graph_are_no_error():
    around_backward([torch.ones(1)], lambda: None, lambda _: None)


def test_a_graph_of_a_cpu_is_left_as_it_is():
    weight = torch.ones(3, requires_grad=True)
    loss = (2 * weight).sum()
    backward_on_current_stream([loss])
    loss.backward()
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]
