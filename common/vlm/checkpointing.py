"""Recomputation of activations in the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


def run_block(block: Callable[..., Result], *arguments: Any, checkpointing: bool) -> Result:
    """Call a block; with `checkpointing`, keep its inputs only and run it again in the backward.

    The blocks of these models have no randomness, so no random state is kept. Without gradients
    there is nothing to run again and the block is called plainly.
    """
    if not checkpointing or not torch.is_grad_enabled():
        return block(*arguments)
    return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
