"""Handwritten digits of scikit-learn as question-and-answer prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

QUESTION = "Which digit is it?"
UPSCALE = 7
"""Each of the 8 x 8 grey pixels becomes a square of this many pixels a side: 56 x 56 in all."""
HELD_OUT_ROWS = 360
SPLIT_SEED = 0
"""Seed of the split; the run's own seed has no influence on which rows are held out."""

_WHITE = 16.0


class Digits(Sequence[dict[str, Any]]):
    """Rows with one image and the field ``answer``."""

    def __init__(self, rows: np.ndarray) -> None:
        """Args: rows: [N] int64 row numbers in scikit-learn's data set."""
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        images, answers = _source()
        row = int(self._rows[index])
        content = [
            {"type": "image", "image": picture(images[row])},
            {"type": "text", "text": QUESTION},
        ]
        return {
            "messages": [{"role": "user", "content": content}],
            "answer": str(answers[row]),
            "digits_row": row,
        }


def train() -> Digits:
    """The rows to learn from."""
    return Digits(_order()[HELD_OUT_ROWS:])


def held_out() -> Digits:
    """Rows that training never sees."""
    return Digits(_order()[:HELD_OUT_ROWS])


def tokenizer_texts() -> list[str]:
    """What the tokenizer of the small model learns its merges from."""
    return [QUESTION, *(str(digit) for digit in range(10))]


def picture(grey: np.ndarray) -> np.ndarray:
    """Args: grey: [8, 8] float, 0 to 16. Returns: [56, 56, 3] uint8."""
    scaled = np.rint(grey * (255.0 / _WHITE)).astype(np.uint8)
    large = np.kron(scaled, np.ones((UPSCALE, UPSCALE), dtype=np.uint8))
    return np.repeat(large[:, :, None], 3, axis=2)


@cache
def _source() -> tuple[np.ndarray, np.ndarray]:
    bunch = load_digits()
    return bunch.images, bunch.target


def _order() -> np.ndarray:
    return np.random.default_rng(SPLIT_SEED).permutation(len(_source()[0]))
