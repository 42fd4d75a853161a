from __future__ import annotations

import pytest

from common.errors import Unavailable
from common.events.bodies import ModelRole
from rollplex.models import Cluster
from rollplex.weights import ConsumerWeights, WeightsReport, read_weights


def read(consumer, role=ModelRole.POLICY, **checksums):
    return ConsumerWeights(consumer=consumer, role=role, version=3, checksums=checksums)


def found(*weights):
    report = WeightsReport("run", weights)
    return [(one.consumer, one.tensor, one.checksum, one.expected) for one in report.differences]


def test_the_one_that_differs_is_named():
    rollout = read("rollout/0", a="1", b="9")
    assert found(read("learner/0", a="1", b="2"), read("prefix-encoder/0", a="1", b="2")) == []
    assert found(
        read("learner/0", a="1", b="2"), read("prefix-encoder/0", a="1", b="2"), rollout
    ) == [("rollout/0", "b", "9", "2")]


def test_an_owner_that_differs_from_all_others_is_named():
    others = (read("prefix-encoder/0", a="2"), read("rollout/0", a="2"))
    assert found(read("learner/0", a="1"), *others) == [("learner/0", "a", "1", "2")]


def test_of_two_the_owner_is_taken_to_be_right():
    reference = ModelRole.REFERENCE
    assert found(
        read("reference/0", reference, a="1"), read("prefix-encoder/0", reference, a="2")
    ) == [("prefix-encoder/0", "a", "2", "1")]


def test_a_tensor_that_only_some_have_is_named():
    assert found(read("learner/0", a="1", b="2"), read("rollout/0", a="1")) == [
        ("rollout/0", "b", None, "2")
    ]


def test_roles_and_pieces_are_compared_by_themselves():
    first, second = {"a[0:1]": "1", "b": "5"}, {"a[1:2]": "2", "b": "5"}
    assert (
        found(
            read("learner/0", **first),
            read("learner/1", **second),
            read("rollout/0", **(first | second)),
            read("reference/0", ModelRole.REFERENCE, **{"a[0:1]": "3"}),
        )
        == []
    )


def test_a_piece_that_one_of_its_holders_reads_otherwise_is_named():
    rollout = read("rollout/0", **{"a[0:1]": "1", "a[1:2]": "9", "b": "5"})
    assert found(
        read("learner/0", **{"a[0:1]": "1", "b": "5"}),
        read("learner/1", **{"a[1:2]": "2", "b": "6"}),
        read("prefix-encoder/0", **{"a[0:1]": "1", "b": "5"}),
        read("prefix-encoder/1", **{"a[1:2]": "2"}),
        rollout,
    ) == [
        ("rollout/0", "a[1:2]", "9", "2"),
        ("learner/1", "b", "6", "5"),
        ("prefix-encoder/1", "b", None, "5"),
    ]


async def test_an_absent_service_is_named():
    with pytest.raises(Unavailable, match="learner, prefix-encoder, reference, rollout"):
        await read_weights(Cluster(services=()), "run", 0, deadline_s=1.0)
