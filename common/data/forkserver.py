"""The process that data workers and checks of data are forked from.

It has imported what they need, which takes seconds, once for all of them; it has no threads, no
device and nothing of a user's. It ends with the process that started it.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.forkserver import ensure_running

_FORKSERVER = multiprocessing.get_context("forkserver")
_PRELOADED = "common.data.preloaded"


def forkserver() -> multiprocessing.context.ForkServerContext:
    """The context whose processes are forked from it, which it starts if it does not run.

    It ends with the thread that calls this. Returns at once: its first process waits until the
    imports are done.
    """
    _FORKSERVER.set_forkserver_preload([_PRELOADED])
    ensure_running()
    return _FORKSERVER
