"""Qwen2.5-VL of SGLang without its tower, its weights read in place from memory of the broker.

Requests bring the tower's embeddings, so nobody would read its weights. The engine reads its model
from a folder with one placeholder tensor: that is the moment, before it captures graphs, at which
parameters become views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from sglang.srt.models import qwen2_5_vl

from services.rollout.engines.sglang.host.memory import keep_weights_out
from services.rollout.engines.sglang.host.sampler import register
from services.rollout.engines.sglang.host.weights import attach
from services.rollout.engines.sglang.messages import PLACEHOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class Qwen2_5_VLForConditionalGeneration(  # noqa: N801 - the name by which SGLang finds it
    qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
):
    """See the module's text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.visual

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Attach to the policy's weights, or load a bucket of them."""
        tensors = dict(weights)
        if set(tensors) == {PLACEHOLDER}:
            attach(
                self,
                rank=get_tensor_model_parallel_rank(),
                ranks=get_tensor_model_parallel_world_size(),
            )
        else:
            super().load_weights(tensors.items())


# SGLang imports this module in each process that makes a model, before it makes sampler and model.
register()
keep_weights_out()

EntryClass = [Qwen2_5_VLForConditionalGeneration]
