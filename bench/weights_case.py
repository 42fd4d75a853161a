"""One pair of layouts whose weights are updated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.layouts.model import layout_pair
from common.layouts.plan import plan_sharing

if TYPE_CHECKING:
    import torch

    from common.layouts.plan import SharingPlan
    from common.vlm.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Attributes: layouts, degrees: of training and of the rollout. device: `cpu` or `cuda`."""

    shape: ModelShape
    layouts: tuple[str, str]
    degrees: tuple[int, int]
    dtype: torch.dtype
    device: str
    bucket_bytes: int
    repeats: int

    def plan(self, *, shared: bool = True) -> SharingPlan:
        """Of as few GPUs as the degrees need."""
        train, rollout = zip(self.layouts, self.degrees, strict=True)
        layouts = layout_pair(self.shape, train, rollout)
        return plan_sharing(*layouts, element_bytes=self.dtype.itemsize, shared=shared)

    def plan_on_one_device(self, *, shared: bool = True) -> SharingPlan:
        """Of one replica of each, all on one device: it reads the memory of all of training."""
        train, rollout = zip(self.layouts, self.degrees, strict=True)
        return plan_sharing(
            *layout_pair(self.shape, train, rollout),
            element_bytes=self.dtype.itemsize,
            shared=shared,
            train_replicas=1,
            rollout_replicas=1,
        )
