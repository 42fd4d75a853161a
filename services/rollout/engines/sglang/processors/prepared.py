"""Prompts that are prepared already: tokens, positions and vision embeddings as they are."""

from __future__ import annotations

from copy import copy
from itertools import groupby
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalInputFormat,
    MultimodalProcessorOutput,
)
from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

from services.rollout.engines.sglang.host.embeddings import SharedEmbeddings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from services.rollout.engines.sglang.messages import GroupSampling

_MODALITIES = {1: Modality.IMAGE, 2: Modality.VIDEO}
"""By `PromptTensors.mm_token_type_ids`."""


class PreparedPrompt:
    """A group's prompt with vision tokens, for all of its requests.

    Its place in the prefix cache follows from the values of its embeddings, so one that was
    embedded by other weights is another prompt.
    """

    def __init__(self, group: GroupSampling) -> None:
        self._group = group
        self._embeddings = SharedEmbeddings(group.vision)
        self._items = tuple(_items(group, self._embeddings))

    def without_embeddings(self) -> PreparedPrompt:
        """The same for requests that find all but its last token, a text token, in the cache.

        SGLang's scheduler ends itself where they do not. What this returns needs no `close`.
        """
        other = copy(self)
        other._items = tuple(copy(item) for item in self._items)
        for item in other._items:
            item.precomputed_embeddings = item.precomputed_embeddings.left_out()
        return other

    def output(self, image_token_id: int, video_token_id: int) -> MultimodalProcessorOutput:
        """What SGLang's scheduler is given of it."""
        group = self._group
        start = group.positions[0, -1] - (group.positions.shape[1] - 1)
        return MultimodalProcessorOutput(
            mm_items=list(self._items),
            input_ids=group.token_ids.tolist(),
            im_token_id=image_token_id,
            video_token_id=video_token_id,
            mrope_positions=group.positions,
            mrope_position_delta=start.reshape(1, 1),
        )

    def close(self) -> None:
        """No request with it comes any more. Once."""
        self._embeddings.close()


class PreparedPrompts(BaseMultimodalProcessor):
    """Takes a `PreparedPrompt` as a request's only image; processes nothing."""

    models = [Qwen2_5_VLForConditionalGeneration]  # noqa: RUF012 - SGLang's own form

    async def process_mm_data_async(
        self, image_data: Sequence[PreparedPrompt], *_: Any, **__: Any
    ) -> MultimodalProcessorOutput:
        """What the engine's scheduler is given of the prompt."""
        (prompt,) = image_data
        return prompt.output(self.hf_config.image_token_id, self.hf_config.video_token_id)


def _items(prompt: GroupSampling, embeddings: SharedEmbeddings) -> Iterator[MultimodalDataItem]:
    """One a run of placeholders, with its part of the embeddings."""
    at = row = 0
    for kind, run in groupby(prompt.mm_token_type_ids.tolist()):
        length = len(list(run))
        if kind in _MODALITIES:
            rows = embeddings.rows(row, row + length)
            yield MultimodalDataItem(
                modality=_MODALITIES[kind],
                hash=rows.digest,
                offsets=[(at, at + length - 1)],
                format=MultimodalInputFormat.PRECOMPUTED_EMBEDDING,
                precomputed_embeddings=rows,
            )
            row += length
        at += length
