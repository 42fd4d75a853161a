"""Real processes of one Gloo group, each running a module of the tests to its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def run_ranks(module: str, folder: Path, *arguments: str, world: int, limit_s: float) -> None:
    """Run `python -m module rank rendezvous folder` once a rank; each has to end well.

    Args: arguments: further ones.
        limit_s: for all of them; those that still run then are killed.
    """
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                *("-m", module, str(rank), str(folder / "rendezvous"), str(folder)),
                *arguments,
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    deadline_s = time.monotonic() + limit_s
    try:
        errors = [rank.communicate(timeout=deadline_s - time.monotonic())[1] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    codes = [rank.returncode for rank in ranks]
    assert codes == [0] * world, "\n".join(error[-2000:] for error in errors)
