"""Rewards for the maze task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from examples.minigrid.planner import ACTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping


def best_action(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is one of the planner's best actions, 0 otherwise."""
    return float(completion.strip() in row["best"])


def is_action(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is any action, 0 otherwise: it teaches the form of an answer."""
    del row
    return float(completion.strip() in ACTIONS)
