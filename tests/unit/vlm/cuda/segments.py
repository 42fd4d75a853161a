"""Attention of the fused tower by plain operations: its packed kernels need a GPU."""

from __future__ import annotations

import torch

from common.vlm.cuda.fused import FusedBlocks
from common.vlm.vision import PlainBlocks, _attend


class SegmentBlocks(FusedBlocks):
    """The fused blocks but for attention itself."""

    plan = PlainBlocks.plan

    def attend(self, query, key, value, plan):
        outputs = torch.cat([_attend(query, key, value, index) for index in plan])
        order = torch.argsort(torch.cat([index.reshape(-1) for index in plan]))
        return outputs[order].view(len(order), *query.shape[::2]).transpose(0, 1)
