"""Which kernels a model runs on: plain modules everywhere, fused ones where they are for.

The choice depends on device, dtype and recipe only, so that all processes of a run choose alike.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

import torch

from common.vlm.model import SplitModel

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLForConditionalGeneration

    from common.vlm.parallel.group import ModelRanks

log = logging.getLogger(__name__)

Kernels = Literal["auto", "plain"]
"""`auto`: fused where they fit; `plain`: the library's modules."""

_FIRST_FUSED_CAPABILITY = (8, 0)
"""Oldest GPUs with the attention kernels that the fused path calls."""


def fused_kernels(kernels: Kernels, *, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a model runs on `common.vlm.cuda`: bfloat16 weights on a GPU that has its kernels.

    Other dtypes stay on plain modules, whose attention is exact in them.
    """
    if kernels == "plain" or device.type != "cuda" or dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_FUSED_CAPABILITY


def split_model(model: Qwen2_5_VLForConditionalGeneration, kernels: Kernels) -> SplitModel:
    """The model in parts, on the kernels that fit its weights.

    Args:
        model: bound to its storage.
        kernels: as in the recipe.
    """
    weight = model.lm_head.weight
    if not fused_kernels(kernels, device=weight.device, dtype=weight.dtype):
        return SplitModel(model)
    return fused_model(model)


def fused_model(
    model: Qwen2_5_VLForConditionalGeneration, ranks: ModelRanks | None = None
) -> SplitModel:
    """The model in parts on `common.vlm.cuda`.

    Args:
        model: bound to its storage, or to be before it runs.
        ranks: over which it is split, from `hold_own_parts`; None for one rank.
    """
    # Triton has to be there only where its kernels run
    from common.vlm.cuda.attention import FusedAttention
    from common.vlm.cuda.fused import FusedSteps

    log.info("fused kernels: %s weights", model.lm_head.weight.dtype)
    return SplitModel(model, attention=FusedAttention(), steps=FusedSteps(ranks=ranks))
