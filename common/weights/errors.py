"""Errors about weight layouts and the storage bound to them."""

from __future__ import annotations

from common.errors import InvalidArgument


class LayoutInvalid(InvalidArgument):
    """A layout that breaks one of its own rules, or a description that is none."""


class LayoutMismatch(InvalidArgument):
    """A buffer, a model or a tensor that does not fit the layout."""


class MissingWeight(InvalidArgument):
    """A parameter that the layout or the checkpoint does not cover.

    Attributes:
        data: ``names``, the uncovered parameters in order.
    """


class UnexpectedWeight(InvalidArgument):
    """A tensor of the layout or the checkpoint that no parameter takes.

    Attributes:
        data: ``names``, the tensors without a parameter, in order.
    """


def shown(names: list[str], limit: int = 8) -> str:
    """The names as text, cut after `limit` of them with the number left out."""
    listed = ", ".join(names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"
