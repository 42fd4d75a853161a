"""The prompt of one group as it lies in leases.

Shapes: P+1 prompt tokens, V vision tokens, h hidden width.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from common.tensors.views import tensor_view
from common.vlm.prompt import PromptTensors
from common.worker.device import copied_aside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from common.tensors.lease import Lease
    from common.worker.scope import TensorShape

EMBEDDINGS = "embeddings"
"""The one tensor of a lease of vision embeddings: [V, h]."""

_IDS = "token_ids"
_POSITIONS = "positions"
_TYPES = "mm_token_type_ids"
_ROW = "row"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """What the rollout needs of a prompt: tokens and positions, no pixels, and the row."""

    token_ids: torch.Tensor
    """[P+1] int64."""
    positions: torch.Tensor
    """[3, P+1] int64."""
    mm_token_type_ids: torch.Tensor
    """[P+1] int64."""
    row: Mapping[str, Any]
    """The data set's row without its messages, for the reward functions."""

    def without_pixels(self) -> PromptTensors:
        """The prompt for a prefix forward from given vision embeddings."""
        nothing = torch.zeros((0, 0))
        grids = torch.zeros((0, 3), dtype=torch.int64)
        return PromptTensors(
            token_ids=self.token_ids,
            positions=self.positions,
            mm_token_type_ids=self.mm_token_type_ids,
            pixel_values=nothing,
            image_grid_thw=grids,
            pixel_values_videos=nothing,
            video_grid_thw=grids,
            second_per_grid_ts=torch.zeros(0),
        )


def prompt_tensors(
    prompt: PromptTensors, row_json: bytes, *, pixels: bool
) -> tuple[dict[str, TensorShape], Callable[[Mapping[str, torch.Tensor]], None]]:
    """Shapes of the lease of a prompt, and what fills it.

    Args:
        prompt: on any device.
        row_json: the row's further fields as UTF-8 JSON.
        pixels: whether all of the prompt goes along, for `whole_prompt`.
    """
    row = torch.frombuffer(bytearray(row_json), dtype=torch.uint8)
    tensors = {
        _IDS: prompt.token_ids,
        _POSITIONS: prompt.positions,
        _TYPES: prompt.mm_token_type_ids,
        _ROW: row,
    }
    if pixels:
        tensors |= prompt.named_tensors()

    def copy(out: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            out[name].copy_(tensor)

    def fill(out: Mapping[str, torch.Tensor]) -> None:
        # not behind a job of the device, which may wait for other ranks
        copied_aside(prompt.token_ids.device, lambda: copy(out))

    return {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, fill


def prompt_text(lease: Lease) -> PromptText:
    """The prompt in a lease; its tensors are views of it."""
    row = tensor_view(lease, _ROW)
    return PromptText(
        token_ids=tensor_view(lease, _IDS),
        positions=tensor_view(lease, _POSITIONS),
        mm_token_type_ids=tensor_view(lease, _TYPES),
        row=json.loads(row.numpy().tobytes()),
    )


def whole_prompt(lease: Lease) -> PromptTensors:
    """A copy of the prompt in a lease that was filled with its pixels."""
    names = [field.name for field in fields(PromptTensors)]
    copies = {name: tensor_view(lease, name).clone() for name in names}
    return PromptTensors.from_named_tensors(copies)
