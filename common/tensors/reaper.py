"""Takes device memory out of this process once no kernel can use it any more.

Device memory must not be unmapped under a running kernel, and nobody tells when the last one has
ended: a tensor dies when Python lets go of it, kernels run later. So pages whose last view is gone
come here, from any thread and from the garbage collector, and one thread waits for the GPU and
unmaps them. What has to follow (the release of a lease) follows the unmapping: bytes that the
ledger calls free are free.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from common.gpu.driver import permit_during_capture, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

log = logging.getLogger(__name__)

_POLL_S = 0.001
"""How often the events of waiting pages are looked at."""


class CudaEvent(Protocol):
    """A recorded event, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether everything before it has ended."""


class Mapped(Protocol):
    """Device memory at an address of this process."""

    ordinal: int

    def unmap(self) -> None:
        """Take it out of this process. No kernel may use it any more."""


class Ending:
    """A callback for the end of a mapping, until it has run or is detached."""

    def __init__(self, departure: Departure, number: int) -> None:
        self._departure = departure
        self._number = number

    @property
    def alive(self) -> bool:
        """Whether it is still to run."""
        return self._number in self._departure.callbacks

    def detach(self) -> object | None:
        """Do not run it. Returns None if it has run, or was detached before."""
        return self._departure.callbacks.pop(self._number, None)


class Departure:
    """What has to happen once the last view of some pages is gone.

    Attributes:
        events: unmap when all of them are over. None: when all GPU work of this process is that
            was asked for until then.
        callbacks: run after unmapping, each once.
    """

    def __init__(self, mapped: Mapped) -> None:
        self.mapped = mapped
        self.events: tuple[CudaEvent, ...] | None = None
        self.callbacks: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._over = False

    def when_over(self, callback: Callable[[], None]) -> Ending:
        """Run something after unmapping, in the reaper's thread; at once if that has happened."""
        number = next(self._numbers)
        self.callbacks[number] = callback
        if self._over:
            self._run_callbacks()
        return Ending(self, number)

    def finish(self) -> None:
        """Unmap, then tell. The reaper calls this."""
        try:
            self.mapped.unmap()
        finally:
            self._over = True
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self.callbacks:
            try:
                _, callback = self.callbacks.popitem()
            except KeyError:
                return  # another thread took the last one
            callback()


class Reaper:
    """See the module's text. One a process."""

    def __init__(self) -> None:
        # Its `put` may be interrupted by a garbage collection that calls `put`.
        self._arrived: queue.SimpleQueue[Departure] = queue.SimpleQueue()
        self._calm = threading.Lock()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; needed before pages can depart. Idempotent; any thread."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="device-memory-reaper", daemon=True
                )
                self._thread.start()

    def put(self, departure: Departure) -> None:
        """The last view is gone. Any thread, also inside a garbage collection; never blocks."""
        self._arrived.put(departure)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing is unmapped, and nothing waits for the GPU, inside the block."""
        with self._calm:
            yield

    def _run(self) -> None:
        permit_during_capture()
        waiting: list[Departure] = []
        while True:
            waiting += self._take(wait=not waiting)
            with self._calm:
                waiting = _settle(waiting)

    def _take(self, *, wait: bool) -> list[Departure]:
        taken = []
        try:
            taken.append(self._arrived.get(timeout=None if wait else _POLL_S))
            while True:
                taken.append(self._arrived.get_nowait())
        except queue.Empty:
            return taken


def _settle(waiting: list[Departure]) -> list[Departure]:
    """Finish what the GPU is done with. Returns what is left."""
    left: list[Departure] = []
    done: list[Departure] = []
    for departure in waiting:
        over = departure.events is None or _over(departure.events)
        (done if over else left).append(departure)
    for ordinal in {each.mapped.ordinal for each in done if each.events is None}:
        _attempt(partial(synchronize, ordinal), "GPU work not awaited")
    for departure in done:
        _attempt(departure.finish, "device memory not unmapped")
    return left


def _over(events: tuple[CudaEvent, ...]) -> bool:
    try:
        return all(event.query() for event in events)
    except Exception:
        # After a fault of the device nothing runs any more, and every call fails.
        log.exception("events not read")
        return True


def _attempt(job: Callable[[], None], failure: str) -> None:
    """A failure here is one of the device; whoever uses it next is told, and the process ends."""
    try:
        job()
    except Exception:
        log.exception(failure)


REAPER = Reaper()


def capturing() -> AbstractContextManager[None]:
    """To be held around the capture of a CUDA graph.

    Waiting for the GPU while a graph is captured spoils the capture, in whichever thread it is
    done; leases that are let go meanwhile are given back after the block.
    """
    return REAPER.quiet()
