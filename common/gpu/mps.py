"""NVIDIA's Multi-Process Service: the daemon that lets processes run on one GPU at a time.

Without it the processes of a node take turns on the GPU, and hiding work in the decode window
cannot pay. The daemon has a folder of its own in the node's state folder, so it is told apart from
any other on the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from common.errors import Unavailable

DAEMON = "nvidia-cuda-mps-control"
DRIVER_FOLDERS = ("/usr/local/nvidia/bin", "/usr/local/cuda/bin", "/usr/bin")
"""Where drivers put the daemon when it is not on the PATH."""
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
_ANSWER_S = 20.0


class MpsUnavailable(Unavailable):
    """There is no MPS daemon here; the message says where it was looked for."""

    retryable = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mps:
    """The daemon of one node.

    Attributes:
        folder: for its pipes and logs.
    """

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What clients of this daemon need in their environment before they open CUDA."""
        return {
            PIPE_VARIABLE: str(self.folder / "pipe"),
            LOG_VARIABLE: str(self.folder / "log"),
        }

    def make_folders(self) -> None:
        """Make what the daemon needs; a supervisor then runs it with `-f` in this environment."""
        for path in self.environment.values():
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)

    def running(self) -> bool:
        """Whether the daemon answers."""
        try:
            self._ask("get_server_list")
        except (OSError, subprocess.SubprocessError, MpsUnavailable):
            return False
        return True

    def _ask(self, command: str) -> None:
        subprocess.run(  # noqa: S603 - the driver's own program
            [find_daemon()],
            input=f"{command}\n",
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=True,
        )


def find_daemon() -> str:
    """The daemon's program. Raises MpsUnavailable naming where it was looked for."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *DRIVER_FOLDERS])
    found = shutil.which(DAEMON, path=path)
    if found is None:
        raise MpsUnavailable(
            f"{DAEMON} is neither on the PATH nor in {', '.join(DRIVER_FOLDERS)}; it comes with "
            "NVIDIA's driver"
        )
    return found


def is_client() -> bool:
    """Whether this process was started as a client of a daemon that answers."""
    pipe = os.environ.get(PIPE_VARIABLE)
    return pipe is not None and Mps(folder=Path(pipe).parent).running()
