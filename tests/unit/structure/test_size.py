"""Ratchets on size. The tables of exceptions may only shrink, and their numbers only fall."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.unit.structure.source import modules, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MODULE_LIMIT_LINES = 500
FUNCTION_LIMIT_LINES = 60

LONG_MODULES: dict[str, int] = {}
"""Modules over the limit, with their length."""

LONG_FUNCTIONS: dict[str, int] = {}
"""Functions over the limit as `path:name`, with their length, docstring not counted."""

BAGS = {"util", "utils", "helper", "helpers", "misc", "tools"}


def _functions() -> Iterator[tuple[str, int]]:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                yield f"{name_of(path)}:{node.name}", lines - _docstring_lines(node)


def _docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    if ast.get_docstring(function) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


def _check(lengths: Mapping[str, int], limit: int, exceptions: Mapping[str, int]) -> None:
    long = {name: lines for name, lines in lengths.items() if lines > limit}
    grown = {name: lines for name, lines in long.items() if lines > exceptions.get(name, limit)}
    assert grown == {}, f"over {limit} lines, and longer than allowed"
    shrunk = {name for name, lines in exceptions.items() if long.get(name, 0) < lines}
    assert shrunk == set(), "shorter than the table of exceptions says: lower it there"


def test_modules_are_short() -> None:
    lengths = {name_of(path): len(path.read_bytes().splitlines()) for path in modules()}
    _check(lengths, MODULE_LIMIT_LINES, LONG_MODULES)


def test_functions_are_short() -> None:
    lengths: dict[str, int] = {}
    for name, lines in _functions():
        lengths[name] = max(lines, lengths.get(name, 0))
    _check(lengths, FUNCTION_LIMIT_LINES, LONG_FUNCTIONS)


def test_no_module_is_a_grab_bag() -> None:
    bags = [name_of(path) for path in modules() if BAGS & {path.stem, path.parent.name}]
    assert bags == []
