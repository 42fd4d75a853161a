"""Errors of the learner."""

from __future__ import annotations

from common.errors import InvalidArgument


class TooManyNonFinite(InvalidArgument):
    """Gradients were NaN or infinite in too many steps in a row; the run stops."""
