"""Names of parts, and what of them is on a device at a time."""

from __future__ import annotations

import pytest

from common.tensors.parts import in_flight_bytes, part_names, whole_of


@pytest.mark.parametrize("count", [1, 2, 10, 11, 101])
def test_names_sort_in_order_and_lead_back_to_the_whole(count: int) -> None:
    names = part_names("policy.optimizer", count)
    assert len(set(names)) == count
    assert list(names) == sorted(names)
    assert {whole_of(name) for name in names} == {"policy.optimizer"}


def test_small_numbers_have_no_leading_zeros() -> None:
    assert part_names("a.b", 1) == ("a.b.0",)
    assert part_names("a.b", 10)[-1] == "a.b.9"
    assert part_names("a.b", 11)[3] == "a.b.03"


@pytest.mark.parametrize("name", ["policy.weights", "optimizer", "7", "a.b1", ""])
def test_any_other_storage_is_a_whole(name: str) -> None:
    assert whole_of(name) == name


@pytest.mark.parametrize(
    ("sizes", "there"), [([], 0), ([7], 7), ([4, 4, 3], 11), ([4, 4, 4, 4, 3], 12)]
)
def test_three_parts_are_in_flight(sizes: list[int], there: int) -> None:
    assert in_flight_bytes(sizes) == there
