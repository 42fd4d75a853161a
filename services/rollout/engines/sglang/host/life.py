"""The host and SGLang's processes end with the service that started them, however it ends."""

from __future__ import annotations

import os
import signal
import threading


def end_with(descriptor: int) -> None:
    """Kill this process's group when the other end of a pipe is closed, SIGKILL included.

    The group has to be the host's own: SGLang's processes are in it.
    """

    def watch() -> None:
        while os.read(descriptor, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    assert os.getpgrp() == os.getpid(), "the host has no process group of its own"
    threading.Thread(target=watch, name="life", daemon=True).start()
