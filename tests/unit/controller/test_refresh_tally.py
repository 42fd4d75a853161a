"""What the rollout's ranks copied is in the step's metrics, of all ranks together."""

from __future__ import annotations

from dataclasses import replace

from common.events import bodies
from common.ids import Participant, Service
from services.controller.metrics import StepObserver
from tests.unit.step.test_schedule import event, plan

NAMES = [
    "weights_alias_bytes",
    "weights_gather_bytes",
    "weights_rebuild_bytes",
    "time_weights_refresh_s",
]


def refreshed(rank, seconds):
    body = bodies.WeightsRefreshed(
        weights_version=plan().weights_version,
        alias_bytes=100 + rank,
        gather_bytes=10,
        rebuild_bytes=1,
        seconds=seconds,
    )
    sender = Participant(service=Service.ROLLOUT, rank=rank)
    return replace(event(body), sender=sender, event_id=f"of {rank}")


def test_bytes_add_up_and_the_slowest_rank_counts():
    observer = StepObserver(plan(), needs_reference=False)
    for rank, seconds in ((0, 0.25), (1, 0.5), (1, 0.5)):
        observer.apply(refreshed(rank, seconds), received_ns=0)
    metrics = observer.record(None).metrics
    assert [metrics[name] for name in NAMES] == [201, 20, 2, 0.5]


def test_of_equal_degrees_there_is_nothing():
    observer = StepObserver(plan(), needs_reference=False)
    assert not observer.record(None).metrics.keys() & set(NAMES)
