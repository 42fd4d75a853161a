"""The one module that reads the environment. A bad value raises; nothing is silently ignored."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.config.base import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

PREFIX = "ROLLPLEX_"
STATE_DIR = "ROLLPLEX_STATE_DIR"
CONFIG = "ROLLPLEX_CONFIG"

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ALLOCATOR = "expandable_segments:True,large_segment_size_mb:256"
"""Segments that grow, for graphs whose sizes change with every prompt; in pieces so large that
there are few to map: each one waits for the copies to the device that run at the moment."""

_COLLECTIVES = {
    # ranks are of one node, and nothing of it is to be reached from outside
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # of a captured graph it registers tensors that lie in one piece of memory: one that grows has
    # several, and what is one on this rank may be two on another
    "NCCL_GRAPH_REGISTER": "0",
    # whether another rank wants a dump is looked up in the rendezvous, and that is removed
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the environment says about Rollplex.

    Attributes:
        state_dir: `ROLLPLEX_STATE_DIR`, where the node keeps its files; None: not set.
        config: `ROLLPLEX_CONFIG`, the deployment file used without `--config`; None: not set.
    """

    state_dir: Path | None
    config: Path | None


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read and check the `ROLLPLEX_*` variables.

    Args:
        variables: the environment to read; None: this process's.

    Raises:
        ConfigError: an empty or unusable value, or a `ROLLPLEX_*` name that means nothing.
    """
    variables = os.environ if variables is None else variables
    unknown = sorted(
        name for name in variables if name.startswith(PREFIX) and name not in (STATE_DIR, CONFIG)
    )
    if unknown:
        raise ConfigError(
            f"environment variable {unknown[0]} is not known; legal are {STATE_DIR}, {CONFIG}"
        )
    state_dir = _path(variables, STATE_DIR)
    if state_dir is not None and state_dir.exists() and not state_dir.is_dir():
        raise ConfigError(f"{STATE_DIR}={str(state_dir)!r} is a file; it has to be a folder")
    config = _path(variables, CONFIG)
    if config is not None and not config.is_file():
        raise ConfigError(f"{CONFIG}={str(config)!r} is not a file")
    return Environment(state_dir=state_dir, config=config)


def set_threads(threads: int, variables: MutableMapping[str, str] | None = None) -> None:
    """Bound the compute threads of this process and its children.

    Has to run before torch or numpy is imported: their thread pools read it once.
    """
    variables = os.environ if variables is None else variables
    for name in _THREAD_VARIABLES:
        variables[name] = str(threads)


def set_allocator(variables: MutableMapping[str, str] | None = None) -> None:
    """Choose how torch's allocator of GPU memory grows, unless the user has.

    Has to run before torch is imported.
    """
    variables = os.environ if variables is None else variables
    if not any(name in variables for name in _ALLOCATOR_VARIABLES):
        variables[_ALLOCATOR_VARIABLES[0]] = _ALLOCATOR


def set_collectives(variables: MutableMapping[str, str] | None = None) -> None:
    """Choose how Gloo and NCCL work on one node, but for what the user has set.

    Has to run before a process's first process group.
    """
    variables = os.environ if variables is None else variables
    for name, value in _COLLECTIVES.items():
        variables.setdefault(name, value)


def search_path() -> str | None:
    """`PATH`, for finding a Redis server; None: not set."""
    return os.environ.get("PATH")


def _path(variables: Mapping[str, str], name: str) -> Path | None:
    text = variables.get(name)
    if text is None:
        return None
    if not text.strip():
        raise ConfigError(f"{name} is set but empty; unset it or give a path")
    return Path(text).expanduser()
