"""A task made for comparisons: every modality, responses of uneven lengths, rewards that differ."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROWS = 24
_SENTENCES = (
    "What is shown here?",
    "Describe the pictures in a few words.",
    "Compare what you see.",
    "Say something short.",
)


def rows() -> Sequence[Mapping[str, Any]]:
    """Rows with one image, two images, a video, and text only, in turn."""
    return [_row(index) for index in range(ROWS)]


def texts() -> list[str]:
    """What the tokenizer is trained on."""
    return [*_SENTENCES, "the quick brown fox jumps over the lazy dog 0 1 2 3 4 5 6 7 8 9"]


def checksum_reward(completion: str, row: Mapping[str, Any]) -> float:
    """A number in [0, 1) that depends on every byte of the completion and on the row."""
    return (zlib.crc32(completion.encode()) + 7 * int(row["index"])) % 101 / 101


def _row(index: int) -> dict[str, Any]:
    generator = np.random.default_rng(index)
    parts: list[dict[str, Any]] = []
    match index % 4:
        case 0:
            parts.append({"type": "image", "image": _picture(generator)})
        case 1:
            parts.extend({"type": "image", "image": _picture(generator)} for _ in range(2))
        case 2:
            frames = [_picture(generator) for _ in range(4)]
            parts.append({"type": "video", "video": frames, "fps": 2.0})
        case _:
            pass
    parts.append({"type": "text", "text": _SENTENCES[index % len(_SENTENCES)]})
    return {"messages": [{"role": "user", "content": parts}], "index": index}


def _picture(generator: np.random.Generator) -> np.ndarray:
    return generator.integers(0, 256, size=(56, 56, 3), dtype=np.uint8)
