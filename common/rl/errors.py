"""Errors of the RL arithmetic."""

from __future__ import annotations

from common.errors import InvalidArgument


class ShapeError(InvalidArgument):
    """Tensors that belong together disagree in shape; the message gives both shapes."""


class NonFiniteValue(InvalidArgument):
    """A reward, a log-probability or another input is NaN or infinite; the message says where."""
