"""What the figures of a benchmark depend on besides its options."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def conditions(device: str, packages: Sequence[str] = ("torch", "transformers")) -> dict[str, Any]:
    """Commit, Python, cores and versions; for `cuda` also the first GPU and its driver.

    Args:
        device: `cpu` or `cuda`.
        packages: installed distributions whose versions matter.
    """
    git = shutil.which("git")
    commit = (
        subprocess.run([git, "rev-parse", "HEAD"], capture_output=True)  # noqa: S603
        if git
        else None
    )
    found: dict[str, Any] = {
        "commit": commit.stdout.decode().strip() or None if commit else None,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        **{name: importlib.metadata.version(name) for name in packages},
    }
    if device == "cuda":
        import pynvml

        pynvml.nvmlInit()
        found |= {
            "gpu": pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
        }
    return found
