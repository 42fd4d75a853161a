"""What is ready for prompts of the next step, kept in this process from one step to the next.

Nothing in here depends on a weight that trains, so an epoch that fails takes nothing of it along.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch

    from common.step.plan import PlannedGroup
    from common.vlm.prefix import PrefixKV
    from common.vlm.prompt import PromptTensors

SampleKey = tuple[str, int]
"""Split and row."""


def sample_key(planned: PlannedGroup) -> SampleKey:
    """Whose prompt a group is about."""
    return planned.split, planned.sample


@dataclass(slots=True, kw_only=True)
class LoadedPrompt:
    """A prompt on the device, and what has been made of it with weights that do not train."""

    text: PromptTensors
    """On the host, without pixels."""
    row_json: bytes
    prompt: PromptTensors
    """On the device; without pixels once nothing will read them."""
    vision: torch.Tensor | None = None
    """[V, h] of a frozen policy tower."""
    reference: PrefixKV | None = None

    @property
    def size_bytes(self) -> int:
        """Device memory, the reference's prefix K/V not counted."""
        tensors = [*self.prompt.named_tensors().values()]
        if self.vision is not None:
            tensors.append(self.vision)
        return sum(tensor.nbytes for tensor in tensors)


class AheadStore:
    """Prompts by sample, under a limit of device memory. Used by one event loop."""

    def __init__(self, *, limit_bytes: int, reference_limit: int | None) -> None:
        """Args: reference_limit: most prompts that have a reference prefix; None: no limit."""
        self._limit_bytes = limit_bytes
        self._reference_limit = reference_limit
        self._kept: dict[SampleKey, LoadedPrompt] = {}
        self._coming_bytes = 0

    @property
    def samples(self) -> Collection[SampleKey]:
        """Whose prompts are kept."""
        return self._kept.keys()

    @property
    def used_bytes(self) -> int:
        """Device memory of all kept prompts and of those that are on their way."""
        return self._coming_bytes + sum(loaded.size_bytes for loaded in self._kept.values())

    @property
    def takes_reference(self) -> bool:
        """Whether one more reference prefix may be kept."""
        kept = sum(loaded.reference is not None for loaded in self._kept.values())
        return self._reference_limit is None or kept < self._reference_limit

    @contextmanager
    def room(self, size_bytes: int) -> Iterator[bool]:
        """Keep so many bytes free for a prompt that is put inside the block.

        Yields: whether it fits; if not, nothing is kept free.
        """
        reserved = size_bytes if self.used_bytes + size_bytes <= self._limit_bytes else 0
        self._coming_bytes += reserved
        try:
            yield reserved == size_bytes
        finally:
            self._coming_bytes -= reserved

    def put(self, key: SampleKey, loaded: LoadedPrompt) -> None:
        """Keep a prompt until it is taken, or not wanted any more; one that is kept stays."""
        self._kept.setdefault(key, loaded)

    def get(self, key: SampleKey) -> LoadedPrompt | None:
        """A prompt, which stays."""
        return self._kept.get(key)

    def take(self, key: SampleKey) -> LoadedPrompt | None:
        """A prompt, which belongs to the caller from now on."""
        return self._kept.pop(key, None)

    def keep_only(self, wanted: Collection[SampleKey]) -> None:
        """Drop what no plan that is known will use."""
        self._kept = {key: loaded for key, loaded in self._kept.items() if key in wanted}

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
