"""Spawned child processes that end with their parent, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait

PARENT_DIED_EXIT_CODE = 3


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
