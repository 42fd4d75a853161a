"""Data sets of the worker tests: some rows do what a user's code should not.

As a file of a test's own, so that what it leaves behind lies beside that copy.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np


class Rows:
    """Row n is a question with n in ``n``, but for the few that misbehave."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        behave(index)
        content = [
            {"type": "image", "image": np.full((56, 56, 3), index, dtype=np.uint8)},
            {"type": "text", "text": "a question"},
        ]
        return {
            "messages": [{"role": "user", "content": content}],
            "n": index,
            "pid": os.getpid(),
            "threads": os.environ["OMP_NUM_THREADS"],
        }


def behave(index):
    if index == 1:
        os._exit(9)
    if index == 2:
        once = Path(__file__).with_name("died-once")
        if not once.exists():
            once.touch()
            os._exit(9)
    if index == 3:
        raise RuntimeError("no such frame")
    if index == 4:
        time.sleep(600)


def rows():
    return Rows()
