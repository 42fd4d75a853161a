"""Finds the function that a ``module:function`` or ``file.py:function`` string names."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def resolve_function(name: str, *, key: str) -> Callable[..., Any]:
    """Import the function called ``name``, such as ``examples.digits.data:train``.

    Args:
        name: ``package.module:function`` or ``path/to/file.py:function``.
        key: the key of the configuration that holds ``name``, for errors.
    Raises: InvalidArgument naming the key, ``name`` and what is wrong with it.
    """
    module_name, separator, attribute = name.rpartition(":")
    if not separator or not module_name or not attribute.isidentifier():
        raise InvalidArgument(
            f"{key} = {name!r} must have the form 'package.module:function' or 'file.py:function'",
            key=key,
            value=name,
        )
    try:
        module = _module(module_name)
    except Exception as error:
        raise InvalidArgument(
            f"{key} = {name!r}: {module_name!r} cannot be imported:"
            f" {type(error).__name__}: {error}",
            key=key,
            value=name,
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise InvalidArgument(
            f"{key} = {name!r}: {module_name!r} has no function {attribute!r}",
            key=key,
            value=name,
        )
    return function


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve(strict=True)
    digest = hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()
    alias = f"rollplex_user_{path.stem}_{digest}"
    if alias in sys.modules:
        return sys.modules[alias]
    spec = importlib.util.spec_from_file_location(alias, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[alias]
        raise
    return module
