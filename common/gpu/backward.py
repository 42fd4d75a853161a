"""Running a backward on another stream than its forward.

Autograd runs every node on the stream that was current in its forward. A prefix that was encoded on
a share of the SMs would be stuck on that share in its backward, when nothing decodes any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.autograd.graph import Node

T = TypeVar("T")

_ACCUMULATE = "AccumulateGrad"
"""Nodes of parameters: they outlive the graph, so that a hook would stay."""


def backward_on_current_stream(outputs: Iterable[Tensor]) -> None:
    """Have the graph behind some outputs run its next backward on the calling thread's stream.

    The stream of the forward, on which autograd adds up and hands over gradients, waits for each
    node and each node for it, so the result is that of the plain backward.

    Args:
        outputs: on one device. Their forward's kernels have ended. A CPU has no streams, and
            nothing is done.
    """
    outputs = list(outputs)
    if not any(output.is_cuda for output in outputs):
        return
    here = torch.cuda.current_stream()

    def enter() -> torch.cuda.Stream:
        there = torch.cuda.current_stream()
        if there != here:
            here.wait_stream(there)
            torch.cuda.set_stream(here)
        return there

    def leave(there: torch.cuda.Stream) -> None:
        if there != here:
            there.wait_stream(here)

    around_backward(outputs, enter, leave)


def around_backward(
    outputs: Iterable[Tensor], enter: Callable[[], T], leave: Callable[[T], None]
) -> None:
    """Call `enter` before, and `leave` with its result after, every node of the next backward.

    Both run in the thread that runs the node. Nodes of parameters are left out.
    """
    for node in _nodes(outputs):
        _surround(node, enter, leave)


def _surround(node: Node, enter: Callable[[], T], leave: Callable[[T], None]) -> None:
    entered: list[T] = []

    def before(_: Any) -> None:
        entered.append(enter())

    def after(_inputs: Any, _outputs: Any) -> None:
        leave(entered.pop())

    node.register_prehook(before)
    node.register_hook(after)


def _nodes(outputs: Iterable[Tensor]) -> list[Node]:
    found: dict[Node, None] = {}
    waiting = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in found or node.name().endswith(_ACCUMULATE):
            continue
        found[node] = None
        waiting.extend(following for following, _ in node.next_functions)
    return list(found)
