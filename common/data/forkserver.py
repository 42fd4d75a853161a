"""The process that data workers and checks of data are forked from.

It has imported what they need, which takes seconds, once for all of them; it has no threads, no
device and nothing of a user's. It ends with the process that started it.
"""

from __future__ import annotations

import multiprocessing

_FORKSERVER = multiprocessing.get_context("forkserver")
_PRELOADED = "common.data.preloaded"


def forkserver() -> multiprocessing.context.ForkServerContext:
    """The context whose processes are forked from it. It is started with the first of them."""
    _FORKSERVER.set_forkserver_preload([_PRELOADED])
    return _FORKSERVER


def start_forkserver() -> None:
    """Have it import while this process does something else. Returns at once."""
    from multiprocessing.forkserver import ensure_running

    forkserver()
    ensure_running()
