"""A sample that is ready for the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.vlm.prompt import PromptTensors

if TYPE_CHECKING:
    from collections.abc import Mapping

_PIXELS = ("pixel_values", "pixel_values_videos")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSample:
    """The tensors of one prompt and the fields that its reward needs.

    Attributes:
        sample: its name, such as ``train[17]``.
        arrays: the tensors of `PromptTensors` by name; they own their memory. What is bfloat16
            there is uint16 here, bit for bit: numpy has no such numbers.
        row_json: UTF-8 JSON object of the row's fields other than ``messages``.
    """

    sample: str
    arrays: Mapping[str, np.ndarray]
    row_json: bytes

    @property
    def prompt_tokens(self) -> int:
        """P+1: tokens of the whole prompt, vision included."""
        return len(self.arrays["token_ids"])

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays and of the row."""
        return sum(array.nbytes for array in self.arrays.values()) + len(self.row_json)

    def prompt(self) -> PromptTensors:
        """The prompt; its tensors share the arrays' memory and must not be written to."""
        tensors = {name: _tensor(array) for name, array in self.arrays.items()}
        return PromptTensors.from_named_tensors(tensors)

    def rounded_to_bfloat16(self) -> PreparedSample:
        """The same sample with half the bytes of pixels.

        A vision tower in bfloat16 begins by rounding them so.
        """
        rounded = {
            name: torch.from_numpy(self.arrays[name]).to(torch.bfloat16).view(torch.uint16).numpy()
            for name in _PIXELS
        }
        return replace(self, arrays={**self.arrays, **rounded})


def _tensor(array: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
