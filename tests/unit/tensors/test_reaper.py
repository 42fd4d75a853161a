"""Departures: what follows when the last view of device memory is gone."""

from __future__ import annotations

import threading

import pytest

from common.tensors.errors import LeaseMisuse
from common.tensors.mapping import Mapping
from common.tensors.reaper import Departure, Reaper, _settle
from common.tensors.spec import DType, TensorSpec
from tests.unit.tensors.test_views import pair


class Memory:
    """Something that is mapped until it is unmapped, once."""

    ordinal = 0

    def __init__(self, story: list[str], failure: Exception | None = None) -> None:
        self.story = story
        self.failure = failure

    def unmap(self) -> None:
        self.story.append("unmapped")
        if self.failure is not None:
            raise self.failure


class Event:
    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)

    def query(self) -> bool:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def departure(story: list[str], *events: Event, failure: Exception | None = None) -> Departure:
    departure = Departure(Memory(story, failure))
    departure.events = events
    departure.when_over(lambda: story.append("told"))
    return departure


def test_told_after_unmapping_and_not_before_the_event() -> None:
    story: list[str] = []
    waiting = [departure(story, Event(False, True))]
    waiting = _settle(waiting)
    assert (len(waiting), story) == (1, [])
    assert _settle(waiting) == []
    assert story == ["unmapped", "told"]


def test_every_event_counts() -> None:
    story: list[str] = []
    waiting = [departure(story, Event(True, True), Event(False, True))]
    assert _settle(waiting) == waiting
    assert _settle(waiting) == []


def test_one_that_waits_keeps_nobody_back() -> None:
    slow, quick = [], []
    left = _settle([departure(slow, Event(False)), departure(quick, Event(True))])
    assert (len(left), slow, quick) == (1, [], ["unmapped", "told"])


def test_a_faulty_device_does_not_keep_the_lease(caplog: pytest.LogCaptureFixture) -> None:
    story: list[str] = []
    broken = departure(story, Event(RuntimeError("illegal address")), failure=RuntimeError("gone"))
    assert _settle([broken]) == []
    assert story == ["unmapped", "told"]
    assert "events not read" in caplog.text
    assert "device memory not unmapped" in caplog.text


def test_a_detached_callback_does_not_run_and_a_late_one_does() -> None:
    story: list[str] = []
    leaving = Departure(Memory(story))
    ending = leaving.when_over(lambda: story.append("unwanted"))
    assert ending.alive
    assert ending.detach() is not None
    assert ending.detach() is None
    assert not ending.alive
    leaving.finish()
    late = leaving.when_over(lambda: story.append("late"))
    assert story == ["unmapped", "late"]
    assert not late.alive


def test_put_comes_from_any_thread_while_it_is_quiet() -> None:
    reaper = Reaper()
    with reaper.quiet():
        putting = threading.Thread(target=reaper.put, args=(departure([]),))
        putting.start()
        putting.join(10)
        assert not putting.is_alive()


def test_host_memory_is_no_device_memory() -> None:
    writer, _ = pair(TensorSpec(name="values", dtype=DType.UINT8, shape=(4,)))
    assert isinstance(writer.mapping, Mapping)
    assert writer.mapping.device == "cpu"
    with pytest.raises(LeaseMisuse, match="kv lies in host memory, not on a GPU"):
        writer.mapping.device_view("values")
