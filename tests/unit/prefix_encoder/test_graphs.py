"""Which prefixes keep their graph, on a device whose memory is counted here."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch

from common.worker.device_memory import DeviceMemory
from services.prefix_encoder.graphs import PrefixGraphs

PER_TOKEN = 10


class Device:
    """Graphs of `PER_TOKEN` bytes a token, and an allocator that keeps what it has taken."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.others = 0
        self.allocated = 0
        self.cached = 0
        self.workspace = 0
        """Allocated for good by the next forward."""

    def memory(self) -> DeviceMemory:
        reserved = self.allocated + self.cached
        return DeviceMemory(
            allocated=self.allocated, reserved=reserved, free=self.total - self.others - reserved
        )

    def give_back(self) -> None:
        self.cached = 0

    def forward(self, tokens: int):
        def run(with_graph: bool) -> str:
            size = self.workspace + (PER_TOKEN * tokens if with_graph else 0)
            self.workspace = 0
            if self.allocated + size > self.total - self.others:
                raise torch.OutOfMemoryError("the device is full")
            self.cached = max(0, self.cached - size)
            self.allocated += size
            return "graph" if with_graph else "no graph"

        return run


def graphs(device: Device | None, limit="auto", reserve=0) -> PrefixGraphs:
    return PrefixGraphs(
        limit,
        reserve_bytes=reserve,
        memory=(lambda: None) if device is None else device.memory,
        give_back=(lambda: None) if device is None else device.give_back,
    )


def kept(chooser: PrefixGraphs, device: Device, *tokens: int) -> list[int | None]:
    """Bytes of the graph of each prefix in turn."""
    found: list[int | None] = []
    for count in tokens:
        having = sum(size is not None for size in found)
        encoded = chooser.forward(device.forward(count), count, kept=having)
        assert encoded.value == ("no graph" if encoded.graph_bytes is None else "graph")
        found.append(encoded.graph_bytes)
    return found


def test_as_many_are_kept_as_fit_beside_the_reserve():
    device = Device(total=450)
    assert kept(graphs(device, reserve=100), device, 10, 10, 10, 10) == [100, 100, 100, None]


def test_a_shorter_prefix_fits_where_a_longer_one_does_not():
    device = Device(total=400)
    assert kept(graphs(device, reserve=100), device, 10, 25, 15, 5) == [100, None, 150, 50]


def test_the_longest_prefix_is_the_measure():
    device = Device(total=1000)
    chooser = graphs(device)
    device.workspace = 90
    assert kept(chooser, device, 1) == [100]
    assert chooser.bytes_of(10) == 1000
    assert kept(chooser, device, 20, 5) == [200, 50]
    assert chooser.bytes_of(10) == 100


def test_one_graph_is_kept_whatever_the_reserve_is():
    device = Device(total=150)
    assert kept(graphs(device, reserve=1000), device, 10, 1) == [100, None]


def test_what_others_take_meanwhile_counts():
    device = Device(total=400)
    chooser = graphs(device)
    assert kept(chooser, device, 10) == [100]
    device.others = 250
    assert not chooser.may_keep(10, kept=1)
    assert chooser.may_keep(5, kept=1)


def test_what_this_process_has_cached_is_room():
    device = Device(total=300)
    device.cached = 300
    assert kept(graphs(device), device, 10, 10, 10, 10) == [100, 100, 100, None]


def test_a_number_is_a_limit_and_all_is_none():
    device = Device(total=10_000)
    assert kept(graphs(device, 2), device, 10, 10, 10) == [100, 100, None]
    device = Device(total=300)
    assert kept(graphs(device, "all", reserve=1000), device, 10, 10, 10) == [100, 100, 100]


def test_nothing_is_measured_on_a_cpu_and_all_are_kept():
    chooser = graphs(None)
    assert all(chooser.may_keep(10_000, kept=count) for count in range(8))
    encoded = chooser.forward(lambda with_graph: with_graph, 10, kept=3)
    assert (encoded.value, encoded.graph_bytes) == (True, 0)


def test_a_graph_for_which_there_is_no_memory_is_left_out(caplog):
    device = Device(total=250)
    device.cached = 50
    with caplog.at_level(logging.WARNING):
        assert kept(graphs(device, "all"), device, 10, 10, 10, 10) == [100, 100, None, None]
    assert device.cached == 0
    (record,) = caplog.records
    assert "the device is full" in record.cause


def test_what_did_not_fit_is_not_tried_again_before_the_next_step():
    device = Device(total=150)
    chooser = graphs(device, "all")
    assert kept(chooser, device, 10, 10) == [100, None]
    device.total = 10_000
    assert not chooser.may_keep(1, kept=1)
    assert chooser.may_keep(1, kept=0)
    chooser.begin_step()
    assert chooser.may_keep(10, kept=1)


def test_a_graph_is_kept_where_all_ranks_can():
    asked = []

    def agree(keeps: bool) -> bool:
        asked.append(keeps)
        return keeps and len(asked) != 2

    device = Device(total=250)
    chooser = PrefixGraphs(
        "auto",
        reserve_bytes=0,
        memory=device.memory,
        give_back=device.give_back,
        agree=agree,
    )
    assert kept(chooser, device, 10, 10, 10, 10) == [100, None, 100, None]
    assert asked == [True, True, True, False]


def test_of_several_ranks_a_refused_graph_is_an_error():
    device = Device(total=50)
    chooser = PrefixGraphs(
        "all",
        reserve_bytes=0,
        memory=device.memory,
        give_back=device.give_back,
        agree=lambda keeps: keeps,
    )
    with pytest.raises(torch.OutOfMemoryError):
        chooser.forward(device.forward(10), 10, kept=0)


def test_the_part_of_a_refused_graph_is_gone_before_the_cache_is_given_back():
    parts = weakref.WeakSet()

    def run(with_graph: bool) -> bool:
        if with_graph:
            part = torch.zeros(1)
            parts.add(part)
            raise torch.OutOfMemoryError("half way")
        return with_graph

    left = []
    chooser = PrefixGraphs(
        "all", reserve_bytes=0, memory=lambda: None, give_back=lambda: left.append(len(parts))
    )
    assert chooser.forward(run, 10, kept=1).graph_bytes is None
    assert left == [0]
