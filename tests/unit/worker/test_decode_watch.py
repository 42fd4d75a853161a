"""Watching a decode that a thread pretends to make."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest

from common.worker import decode_watch
from common.worker.decode_watch import watched_iteration_s
from common.worker.live_decode import LiveDecode


@pytest.fixture
def live():
    live = LiveDecode.private()
    live.set_rows(8)
    return live


@contextmanager
def decoding(live, *, during=lambda iterations: None):
    """Iterations of 2 ms, at least."""
    ends = threading.Event()

    def run() -> None:
        number = 0
        while not ends.is_set():
            time.sleep(0.002)
            live.iterated()
            number += 1
            during(number)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_the_time_of_an_iteration_is_found(live, monkeypatch):
    monkeypatch.setattr(decode_watch, "LIMIT_S", 20.0)  # on a machine with other work to do
    with decoding(live):
        before = live.reading()
        seconds = watched_iteration_s(live)
        after = live.reading()
    assert seconds is not None
    assert seconds >= 0.002
    assert after.iterations - before.iterations >= decode_watch.LEAST_ITERATIONS


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda live, number: live.set_rows(1 << number % 16), id="other sequences"),
        pytest.param(lambda live, number: live.set_rows(0), id="none"),
        pytest.param(lambda live, number: live.admitted(), id="new groups"),
    ],
)
def test_a_batch_that_changes_is_not_measured(live, change):
    with decoding(live, during=lambda number: change(live, number)):
        assert watched_iteration_s(live) is None


def test_a_decode_that_stands_still_is_not_waited_for(live):
    live.iterated()
    assert watched_iteration_s(live) is None
