"""Plans that four processes carry out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from common.layouts.model import layout_pair
from common.layouts.plan import plan_sharing
from common.vlm.shape import shape_of
from common.vlm.tiny import tiny_config

WORLD = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    train: tuple[str, int]
    rollout: tuple[str, int]
    dtype: torch.dtype
    tied: bool
    round_bytes: int

    @property
    def plan(self):
        """Fewer key/value heads than ranks; a vocabulary that no degree divides."""
        shape = replace(
            shape_of(tiny_config(vision_heads=4).to_dict(), name="tiny"),
            vocabulary=1493,
            layers=3,
            tied=self.tied,
        )
        layouts = layout_pair(shape, self.train, self.rollout)
        return plan_sharing(*layouts, element_bytes=self.dtype.itemsize, gpus=WORLD)


CASES = [
    Case(
        train=(train, train_tp),
        rollout=(rollout, rollout_tp),
        dtype=dtype,
        tied=tied,
        round_bytes=round_bytes,
    )
    for train, rollout, dtype, tied, round_bytes in (
        ("native", "sglang", torch.bfloat16, False, 1 << 30),
        ("megatron", "sglang", torch.float32, True, 20_000),
        ("native", "native", torch.float32, True, 20_000),
    )
    for train_tp in (1, 2, 4)
    for rollout_tp in (1, 2, 4)
]
