"""Reads recipes the way the command and the client do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config.loading import load_config
from common.config.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Sequence


def load_recipe(path: Path, *, sets: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Relative paths in it are taken from the current folder and made absolute, because the services
    that open them run elsewhere.

    Args:
        path: a `.toml` file, or the `recipe.json` of a run.
        sets: `table.key=value` items that override the file.

    Raises:
        InvalidArgument: one line for each wrong key, with its value and what is legal.
    """
    return absolute_paths(load_config(Recipe, path, sets=sets))


def absolute_paths(recipe: Recipe) -> Recipe:
    """The same recipe with every file named by its absolute path."""
    tree = recipe.model_dump()
    for table, key in (
        ("model", "path"),
        ("model", "reference_path"),
        ("training", "replay_from"),
    ):
        tree[table][key] = _absolute(tree[table][key])
    for key in ("train", "eval"):
        tree["data"][key] = _absolute_source(tree["data"][key])
    for function in tree["reward"]["functions"]:
        function["function"] = _absolute_source(function["function"])
    return Recipe.model_validate(tree)


def _absolute(path: Any) -> Path | None:
    return None if path is None else Path(path).expanduser().absolute()


def _absolute_source(source: str | None) -> str | None:
    """`a/b.jsonl` and `a/b.py:function` name files; `a.b:function` names a module."""
    if source is None:
        return None
    file, colon, function = source.rpartition(":")
    if colon and file.endswith(".py"):
        return f"{_absolute(file)}:{function}"
    return str(_absolute(source)) if source.endswith(".jsonl") else source
