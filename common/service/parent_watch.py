"""Spawned child processes that end with their parent, however it ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait

PARENT_DIED_EXIT_CODE = 3

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End this process at once when the one that spawned it has died, SIGKILL included.

    Call it first in a child of `multiprocessing` (as a pool's initializer, for example). In a
    process that has no such parent it does nothing.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        # No clean-up may run: it could wait for the parent that is gone.
        os._exit(PARENT_DIED_EXIT_CODE)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def die_with_starter() -> None:
    """Have the kernel kill this process when the thread that started it ends, SIGKILL included.

    For a process that may have no threads of its own, started by its parent's main thread. What it
    forks does not inherit this. Raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
