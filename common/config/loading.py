"""From TOML (or resolved JSON) and `--set a.b=v` to a checked, frozen configuration."""

from __future__ import annotations

import difflib
import json
import tomllib
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from common.config.base import ConfigError, FrozenConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pydantic_core import ErrorDetails

Config = TypeVar("Config", bound=FrozenConfig)

_VALUE_LIMIT = 80


def load_config(
    model: type[Config],
    path: Path | None,
    *,
    sets: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Read, merge and check one configuration.

    Precedence, highest first: `sets`, `overrides`, the file, the model's defaults.

    Args:
        model: what the file describes.
        path: a `.toml` file, or a `.json` file as `FrozenConfig.resolved_json` writes it;
            None: defaults only.
        sets: `a.b=value` items. The value is read as TOML; text that is not TOML is a string.
        overrides: values by dotted key, such as those that the environment gives.

    Raises:
        ConfigError: unreadable file, bad syntax, or wrong values, all of them in one message.
    """
    tree = read_tree(path) if path is not None else {}
    for key, value in (overrides or {}).items():
        _assign(tree, key, value, "override")
    for item in sets:
        key, value = parse_set(item)
        _assign(tree, key, value, f"--set {item}")
    sources = [str(path)] if path is not None else ["the defaults"]
    sources += [f"--set {item}" for item in sets]
    return check(model, tree, source=", ".join(sources))


def check(model: type[Config], tree: Mapping[str, Any], *, source: str) -> Config:
    """Validate a tree of plain values; `source` is named in the error.

    Raises:
        ConfigError: with one line for each wrong key.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        problems = tuple(_explain(model, detail) for detail in error.errors())
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(
            f"{model.__name__} from {source} is not valid:\n{lines}", problems=problems
        ) from error


def read_tree(path: Path) -> dict[str, Any]:
    """Parse a TOML or JSON file to a plain tree.

    Raises:
        ConfigError: the file is missing, unreadable, of another kind or malformed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error}") from error
    try:
        if path.suffix == ".json":
            tree = json.loads(text)
        elif path.suffix == ".toml":
            tree = tomllib.loads(text)
        else:
            raise ConfigError(
                f"configuration file {path} ends in {path.suffix!r}; legal are .toml and .json"
            )
    except ValueError as error:
        raise ConfigError(f"configuration file {path} is malformed: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"configuration file {path} holds {type(tree).__name__}, not a table")
    return tree


def parse_set(item: str) -> tuple[str, Any]:
    """Split `a.b=value`. Raises ConfigError without a key or an equals sign."""
    key, equals, text = item.partition("=")
    key = key.strip()
    if not equals or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"--set {item!r} is not of the form key=value or table.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    return key, value


def _assign(tree: dict[str, Any], key: str, value: Any, source: str) -> None:
    *tables, leaf = key.split(".")
    node = tree
    for depth, table in enumerate(tables):
        child = node.setdefault(table, {})
        if not isinstance(child, dict):
            prefix = ".".join(tables[: depth + 1])
            raise ConfigError(f"{source}: {prefix} is {_short(child)}, not a table of keys")
        node = child
    node[leaf] = value


def _explain(model: type[BaseModel], detail: ErrorDetails) -> str:
    parts = [part for part in detail["loc"] if part != "[key]"]
    key = ".".join(str(part) for part in parts) or "(the whole file)"
    kind = detail["type"]
    if kind == "extra_forbidden":
        legal = _legal_keys(model, parts[:-1])
        near = difflib.get_close_matches(str(parts[-1]), legal, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"{key}: unknown key; legal here: {', '.join(legal)}.{hint}"
    if kind == "missing":
        return f"{key}: has to be given, it has no default"
    reason = detail["msg"].removeprefix("Value error, ").replace("Input should", "should")
    if not parts:
        return reason
    return f"{key} = {_short(detail['input'])}: {reason}"


def _legal_keys(model: type[BaseModel], table: Sequence[int | str]) -> list[str]:
    node: type[BaseModel] | None = model
    for part in table:
        if node is not None and part in node.model_fields:
            node = _model_inside(node.model_fields[str(part)].annotation)
    return sorted(node.model_fields) if node is not None else []


def _model_inside(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _model_inside(argument)
        if found is not None:
            return found
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE_LIMIT else text[: _VALUE_LIMIT - 1] + "…"
