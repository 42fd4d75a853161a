"""The words of a decode, written by one thread and read by another."""

from __future__ import annotations

import threading

from common.worker.live_decode import LiveDecode


def test_a_decode_begins_with_nothing():
    live = LiveDecode.private()
    reading = live.reading()
    assert (reading.rows, reading.admissions, reading.iterations) == (0, 0, 0)
    assert reading.ended_ns == 0


def test_iterations_are_counted_however_many_are_reported_at_once():
    live = LiveDecode.private()
    seen = []
    for count in (1, 4, 1, 1):
        live.iterated(count)
        seen.append(live.reading())
    assert [reading.iterations for reading in seen] == [1, 5, 6, 7]
    assert [reading.burst for reading in seen] == [1, 4, 1, 1]
    ends = [reading.ended_ns for reading in seen]
    assert ends == sorted(ends)
    assert all(reading.ended_ns <= reading.at_ns for reading in seen)


def test_who_attaches_later_goes_on_counting():
    words = memoryview(bytearray(9 * 8)).cast("q")
    LiveDecode(words).iterated(3)
    LiveDecode(words).iterated(2)
    assert LiveDecode(words).reading().iterations == 5


def test_no_reader_sees_half_of_a_report():
    live = LiveDecode.private()
    reports = 20_000

    def write() -> None:
        for _ in range(reports):
            live.iterated(7)

    writing = threading.Thread(target=write)
    writing.start()
    seen = []
    while writing.is_alive():
        seen.append(live.reading())
    writing.join()
    assert live.reading().iterations == 7 * reports
    ended = {}
    for reading in seen:
        assert reading.iterations % 7 == 0
        assert ended.setdefault(reading.iterations, reading.ended_ns) == reading.ended_ns
    assert [r.iterations for r in seen] == sorted(r.iterations for r in seen)
