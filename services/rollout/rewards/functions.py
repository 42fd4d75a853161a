"""From a reward function's name in the recipe to the function."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.rollout.rewards.errors import RewardFunctionInvalid

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def load_function(name: str) -> Callable[..., Any]:
    """Import `module:function` or `path/to/file.py:function`.

    A relative path counts from the working directory; the file may import its siblings.

    Raises: RewardFunctionInvalid if there is no such function, its module fails to import, or it
        cannot be called with a completion and a row.
    """
    source, _, attribute = name.rpartition(":")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    except RewardFunctionInvalid:
        raise
    except BaseException as error:  # a user's module may end in anything
        cause = f"{type(error).__name__}: {error}"
        raise RewardFunctionInvalid(
            f"reward function {name!r}: importing {source!r} raised {cause}",
            function=name,
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise RewardFunctionInvalid(
            f"reward function {name!r}: {source!r} has no function {attribute!r}", function=name
        )
    _check_signature(name, function)
    return function


def _load_module(source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name and (source == error.name or source.startswith(f"{error.name}.")):
            raise RewardFunctionInvalid(
                f"reward function module {source!r} is not on the import path: must be a "
                "module that Python finds from the working directory, or a path that ends in .py",
                module=source,
            ) from error
        raise


def _load_file(path: Path) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        raise RewardFunctionInvalid(f"reward function file {str(path)!r}: no such file")
    name = f"rollplex_reward_{path.stem}_{hashlib.blake2b(bytes(path), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    if inspect.iscoroutinefunction(function):
        raise RewardFunctionInvalid(f"reward function {name!r}: must not be async", function=name)
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # builtins may have none
    try:
        signature.bind("", {})
    except TypeError as error:
        raise RewardFunctionInvalid(
            f"reward function {name!r} has the signature {signature}: must take (completion, row)",
            function=name,
        ) from error
