"""Rewards for the maze task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from examples.minigrid.planner import ACTIONS


def best_action(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is one of the planner's best actions, 0 otherwise."""
    return float(completion.strip() in row["best"])


def is_action(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is any action, 0 otherwise: it teaches the form of an answer."""
    del row
    return float(completion.strip() in ACTIONS)
