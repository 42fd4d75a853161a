"""Prompts that are prepared already: tokens, positions and vision embeddings as they are."""

from __future__ import annotations

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

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from services.rollout.engines.sglang.messages import GroupSampling

_MODALITIES = {1: Modality.IMAGE, 2: Modality.VIDEO}
"""By `PromptTensors.mm_token_type_ids`."""


class PreparedPrompts(BaseMultimodalProcessor):
    """Takes a `GroupSampling` as a request's only image; processes nothing.

    A prompt's place in the prefix cache follows from the values of its embeddings, so one that was
    embedded by other weights is another prompt.
    """

    models = [Qwen2_5_VLForConditionalGeneration]  # noqa: RUF012 - SGLang's own form

    async def process_mm_data_async(
        self, image_data: Sequence[GroupSampling], *_: Any, **__: Any
    ) -> MultimodalProcessorOutput:
        """What the engine's scheduler is given of the prompt."""
        (prompt,) = image_data
        start = prompt.positions[0, -1] - (prompt.positions.shape[1] - 1)
        return MultimodalProcessorOutput(
            mm_items=list(_items(prompt)),
            input_ids=prompt.token_ids.tolist(),
            im_token_id=self.hf_config.image_token_id,
            video_token_id=self.hf_config.video_token_id,
            mrope_positions=prompt.positions,
            mrope_position_delta=start.reshape(1, 1),
        )


def _items(prompt: GroupSampling) -> Iterator[MultimodalDataItem]:
    """One a run of placeholders, with its part of the embeddings."""
    at = row = 0
    for kind, run in groupby(prompt.mm_token_type_ids.tolist()):
        length = len(list(run))
        if kind in _MODALITIES:
            yield MultimodalDataItem(
                modality=_MODALITIES[kind],
                offsets=[(at, at + length - 1)],
                format=MultimodalInputFormat.PRECOMPUTED_EMBEDDING,
                precomputed_embeddings=prompt.vision[row : row + length],
            )
            row += length
        at += length
