"""Opens the rows that a recipe names.

A row is a mapping with ``messages`` in the Hugging Face chat format; every other field is for the
reward function and must be JSON. Content parts are ``{"type": "text", "text": ...}``,
``{"type": "image", "image": path | PIL image | array}`` and ``{"type": "video", "video": frames |
path of a .npy file, "fps": ..., "frames_indices": [...]}``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from common.data.resolve import resolve_function
from common.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping


@runtime_checkable
class Dataset(Protocol):
    """Rows by number. Reading a row twice gives equal rows."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Row ``index``, from 0."""
        ...


def open_dataset(source: str, *, key: str) -> Dataset:
    """Open the rows that ``source`` names.

    Args:
        source: ``module:function`` or ``file.py:function`` that returns a sequence of rows, or the
            path of a JSONL file.
        key: the recipe's key, for errors.
    Raises: InvalidArgument if it cannot be found, has the wrong type or no rows.
    """
    if source.endswith(".jsonl"):
        dataset: Any = JsonLines(Path(source), key=key)
    else:
        function = resolve_function(source, key=key)
        try:
            dataset = function()
        except Exception as error:
            raise InvalidArgument(
                f"{key} = {source!r} raised {type(error).__name__}: {error}", key=key, value=source
            ) from error
    if not isinstance(dataset, Dataset):
        raise InvalidArgument(
            f"{key} = {source!r} returned {type(dataset).__name__};"
            " a sequence of rows with len() and [index] is needed",
            key=key,
            value=source,
        )
    if len(dataset) == 0:
        raise InvalidArgument(f"{key} = {source!r} has no rows", key=key, value=source)
    return dataset


class JsonLines:
    """One JSON object a line; blank lines are skipped.

    Relative paths of images and videos are taken from the file's own folder.
    """

    def __init__(self, path: Path, *, key: str) -> None:
        """Find where the lines start. Raises: InvalidArgument if the file cannot be read."""
        self._path = path
        self._offsets_bytes: list[int] = []
        try:
            with path.open("rb") as lines:
                offset_bytes = 0
                for line in lines:
                    if line.strip():
                        self._offsets_bytes.append(offset_bytes)
                    offset_bytes += len(line)
        except OSError as error:
            raise InvalidArgument(
                f"{key} = {str(path)!r} cannot be read: {error}", key=key, value=str(path)
            ) from error

    def __len__(self) -> int:
        return len(self._offsets_bytes)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        with self._path.open("rb") as lines:
            lines.seek(self._offsets_bytes[index])
            row = json.loads(lines.readline())
        if not isinstance(row, dict):
            raise TypeError(f"row {index} of {self._path} is not a JSON object")
        for message in row.get("messages") or ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                self._anchor(part)
        return row

    def _anchor(self, part: Any) -> None:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image", "video") and isinstance(part.get(kind), str):
            part[kind] = str(self._path.parent / part[kind])
        elif kind == "video" and isinstance(part.get(kind), list):
            part[kind] = [
                str(self._path.parent / frame) if isinstance(frame, str) else frame
                for frame in part[kind]
            ]
