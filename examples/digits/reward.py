"""Rewards for the digits task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def exact_match(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is the digit in the picture, 0 otherwise."""
    return float(completion.strip() == row["answer"])


def is_digit(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is any single digit, 0 otherwise: it teaches the form of an answer."""
    del row
    text = completion.strip()
    return float(len(text) == 1 and text in "0123456789")
