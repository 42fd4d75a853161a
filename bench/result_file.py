"""The file of a measurement that takes hours: whole at any time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_result(path: Path | None, report: Mapping[str, Any]) -> None:
    """Replace the file by the report so far. Args: path: None: write nothing."""
    if path is None:
        return
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
