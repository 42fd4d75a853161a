"""Turns a row of a data set into the tensors of a prompt.

Text is rendered by the chat template and tokenized once; each placeholder token is then repeated in
the token ids, so what the model sees is exactly what the tokenizer gave.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from common.data.errors import SampleError, SampleFault
from common.data.prepared import PreparedSample
from common.data.vision import Patches, VisionProcessor
from common.vlm.errors import ModelFilesError, PromptInvalid
from common.vlm.files import check_model_files
from common.vlm.loading import load_config
from common.vlm.prompt import prepare_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """What a prompt may be.

    Attributes:
        max_prompt_tokens: longest prompt, vision tokens counted.
        min_pixels: smallest picture area; None: the model folder's own.
        max_pixels: largest picture area; None: the model folder's own.
    """

    max_prompt_tokens: int
    min_pixels: int | None = None
    max_pixels: int | None = None


class PromptProcessor:
    """Tokenizer, chat template and image processor of one model folder."""

    def __init__(self, model_path: str | Path, limits: PromptLimits) -> None:
        """Load them; weights are not asked for. Raises: ModelFilesError, UnsupportedModel."""
        check_model_files(model_path, weights=False)
        folder = Path(model_path)
        self._limits = limits
        self._config = load_config(folder)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise ModelFilesError(
                f"{folder} has a tokenizer that cannot be loaded: {error}", path=str(folder)
            ) from error
        if self._tokenizer.chat_template is None:
            raise ModelFilesError(f"{folder} has no chat template", path=str(folder))
        self._vision = VisionProcessor(
            folder, self._config, min_pixels=limits.min_pixels, max_pixels=limits.max_pixels
        )

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        return self._tokenizer

    def prepare(self, row: Mapping[str, Any], *, sample: str) -> PreparedSample:
        """Render, tokenize and process one row.

        Args:
            row: see `common.data.dataset`.
            sample: the row's name in errors.
        Raises: SampleError.
        """
        messages = _messages(row, sample)
        row_json = reward_fields(row, sample)
        images = [self._vision.image(part, sample) for part in _parts(messages, "image")]
        videos = [self._vision.video(part, sample) for part in _parts(messages, "video")]
        token_ids = self._expand(self._tokenize(messages, sample), images, videos, sample)
        try:
            prompt = prepare_prompt(
                self._config,
                token_ids=torch.from_numpy(token_ids),
                **_tensors("", "image", images),
                **_tensors("_videos", "video", videos),
                second_per_grid_ts=torch.tensor([video.second_per_grid for video in videos]),
                sample=f"sample {sample}",
            )
        except PromptInvalid as error:
            raise SampleError(SampleFault.PLACEHOLDER_MISMATCH, sample, str(error)) from error
        arrays = {
            name: value.contiguous().numpy() for name, value in prompt.named_tensors().items()
        }
        return PreparedSample(sample=sample, arrays=arrays, row_json=row_json)

    def _tokenize(self, messages: list[dict[str, Any]], sample: str) -> np.ndarray:
        """[tokens] int64 with one placeholder token for each picture and video."""
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            raise SampleError(
                SampleFault.BAD_MESSAGES, sample, f"the chat template refused it: {error}"
            ) from error
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64)

    def _expand(
        self, ids: np.ndarray, images: list[Patches], videos: list[Patches], sample: str
    ) -> np.ndarray:
        """Repeat every placeholder as often as its picture or video has merged patches."""
        repeats = np.ones(len(ids), dtype=np.int64)
        vision_config: Any = self._config.vision_config
        merged = vision_config.spatial_merge_size**2
        for kind, token, media in (
            ("image", self._config.image_token_id, images),
            ("video", self._config.video_token_id, videos),
        ):
            places = np.flatnonzero(ids == token)
            if len(places) != len(media):
                raise SampleError(
                    SampleFault.PLACEHOLDER_MISMATCH,
                    sample,
                    f"the prompt has {len(places)} {kind} placeholders, the row has {len(media)}"
                    f" {kind}s",
                    placeholders=len(places),
                    media=len(media),
                )
            repeats[places] = [len(item.values) // merged for item in media]
        tokens, limit = int(repeats.sum()), self._limits.max_prompt_tokens
        if tokens > limit:
            vision = sum(len(item.values) // merged for item in (*images, *videos))
            raise SampleError(
                SampleFault.TOO_LONG,
                sample,
                f"its prompt has {tokens} tokens, {vision} of them vision;"
                f" data.max_prompt_tokens is {limit}",
                tokens=tokens,
                vision_tokens=vision,
                limit=limit,
            )
        return np.repeat(ids, repeats)


def reward_fields(row: Mapping[str, Any], sample: str) -> bytes:
    """UTF-8 JSON of every field but ``messages``. Raises: SampleError naming the field."""
    fields = {name: value for name, value in row.items() if name != "messages"}
    try:
        return json.dumps(fields, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        pass
    for name, value in fields.items():
        try:
            json.dumps({name: value}, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise SampleError(
                SampleFault.BAD_FIELDS,
                sample,
                f"field {name!r} of type {type(value).__name__} is not JSON: {error}",
                field=str(name),
            ) from error
    raise SampleError(SampleFault.BAD_FIELDS, sample, "its fields are not JSON together")


def _messages(row: Mapping[str, Any], sample: str) -> list[dict[str, Any]]:
    """The chat without pixels in the template's way. Raises: SampleError."""
    messages = row.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise SampleError(
            SampleFault.BAD_MESSAGES, sample, "'messages' must be a list with one or more turns"
        )
    has_text = False
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise SampleError(
                SampleFault.BAD_MESSAGES, sample, f"message {number} is no mapping with a 'role'"
            )
        content = message.get("content")
        if isinstance(content, str):
            has_text = has_text or bool(content.strip())
            continue
        if not isinstance(content, Sequence):
            raise SampleError(
                SampleFault.BAD_MESSAGES,
                sample,
                f"message {number} has content of type {type(content).__name__};"
                " text or a list of parts is needed",
            )
        for part in content:
            has_text = _check_part(part, number, sample) or has_text
    if not has_text:
        raise SampleError(SampleFault.NO_TEXT, sample, "no message has any text")
    return [dict(message) for message in messages]


def _check_part(part: Any, number: int, sample: str) -> bool:
    """Whether the part has text. Raises: SampleError for a part that is not in the format."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "image", "video") or kind not in part:
        raise SampleError(
            SampleFault.BAD_MESSAGES,
            sample,
            f"message {number} has a part of type {kind!r}; legal are 'text', 'image' and 'video',"
            " each with a field of that name",
        )
    if kind != "text":
        return False
    if not isinstance(part["text"], str):
        raise SampleError(
            SampleFault.BAD_MESSAGES, sample, f"message {number} has text that is not a string"
        )
    return bool(part["text"].strip())


def _parts(messages: list[dict[str, Any]], kind: str) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        if not isinstance(message["content"], str):
            yield from (part for part in message["content"] if part["type"] == kind)


def _tensors(suffix: str, kind: str, media: list[Patches]) -> dict[str, torch.Tensor]:
    if not media:
        return {}
    return {
        f"pixel_values{suffix}": torch.from_numpy(np.concatenate([m.values for m in media])),
        f"{kind}_grid_thw": torch.tensor([m.grid_thw for m in media], dtype=torch.int64),
    }
