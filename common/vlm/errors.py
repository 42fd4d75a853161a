"""Errors of model files, prompts and the split model."""

from __future__ import annotations

from common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted


class ModelFilesError(InvalidArgument):
    """A model folder lacks a file or has one that cannot be read.

    Attributes:
        data: ``path``, the file or folder.
    """


class UnsupportedModel(InvalidArgument):
    """A model type, or a setting of one, that the split pass does not implement."""


class DegreeInvalid(InvalidArgument):
    """A number of tensor-parallel ranks over which a model cannot be split."""


class PromptInvalid(InvalidArgument):
    """A prompt whose tokens, grids and pixels do not agree."""


class ResponseInvalid(InvalidArgument):
    """Responses whose lengths do not fit their tokens."""


class DecodePoolFull(ResourceExhausted):
    """No free slot, or a slot too small for what it should hold."""


class DecodeStateInvalid(FailedPrecondition):
    """A slot or lane of a decode pool that is not in the state that the call needs."""
