"""Ranks as threads of one process, with a real Gloo group among them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=30)


class Ranks:
    """A thread a rank, and a group of each size."""

    def __init__(self, *sizes, timeout=TIMEOUT):
        self._timeout = timeout
        self._store = dist.HashStore()
        self._threads = ThreadPoolExecutor(max(sizes))
        self._groups = {size: self._joined(size) for size in sizes}

    def run(self, size, work):
        """What `work` returns for the group of each rank; the first error, if there is one."""
        running = [self._threads.submit(work, group) for group in self._groups[size]]
        # a rank that failed must not leave others behind in a collective
        wait(running)
        return [one.result() for one in running]

    def close(self):
        self._threads.shutdown()
        self._groups.clear()

    def _joined(self, size):
        return list(self._threads.map(lambda rank: self._join(rank, size), range(size)))

    def _join(self, rank, size):
        store = dist.PrefixStore(f"{size}", self._store)
        group = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, self._timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, backend)
        return group
