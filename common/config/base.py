"""The base of every configuration model, and the error that a bad one raises."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from common.errors import InvalidArgument


class FrozenConfig(BaseModel):
    """A configuration table: immutable, no unknown keys, one docstring a field.

    Subclasses describe each field by a string below it; it becomes the field's description in the
    JSON schema. Build one from a file with `common.config.loading.load_config`, whose errors are
    written for people; the constructor itself raises pydantic's `ValidationError`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    def resolved_json(self) -> str:
        """Every value, defaults included, as indented JSON; `load_config` reads it back."""
        return self.model_dump_json(indent=2)


class ConfigError(InvalidArgument):
    """A configuration value that is wrong; the message names the key, the value and what is legal.

    Attributes:
        problems: one line for each wrong key.
    """

    def __init__(self, message: str, *, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems
