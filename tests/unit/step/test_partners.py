"""Ranks of services with unequal numbers of them: who reads whom."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from common.events import bodies
from common.ids import WORKERS, GroupId, LeaseId, Participant, Service
from common.layouts.heads import nested_heads
from common.layouts.rows import Cut
from common.step.partners import Partners
from common.step.view import StepView
from tests.unit.step.test_ranks import said
from tests.unit.step.test_schedule import generated, plan

DEGREES = list(product((1, 2, 4), repeat=2))


def sides(train, rollout, *, replicas=(1, 1)):
    """All of training, and the rollout."""
    return Partners(
        dict.fromkeys(WORKERS, train) | {Service.ROLLOUT: rollout},
        dict.fromkeys(WORKERS, replicas[0]) | {Service.ROLLOUT: replicas[1]},
    )


def learner(rank):
    return Participant(service=Service.LEARNER, rank=rank)


def rollout(rank):
    return Participant(service=Service.ROLLOUT, rank=rank)


@pytest.mark.parametrize(
    ("degrees", "read"),
    [((1, 1), [0]), ((2, 2), [0, 1]), ((2, 1), [0]), ((1, 2), [0, 0]), ((2, 4), [0, 0, 1, 1])],
    ids=str,
)
def test_a_rank_of_the_rollout_reads_one_of_training(degrees, read):
    partners = sides(*degrees)
    ranks = [partners.partner(one, Service.LEARNER).rank for one in partners.all(Service.ROLLOUT)]
    assert ranks == read


def test_rank_0_reads_rank_0():
    for degrees in DEGREES:
        partners = sides(*degrees)
        assert partners.partner(learner(0), Service.ROLLOUT) == rollout(0)
        assert partners.partner(rollout(0), Service.LEARNER) == learner(0)


def test_every_rank_is_read_by_those_whose_partner_it_is_and_no_other():
    for degrees in DEGREES:
        partners = sides(*degrees)
        for reader, service in product(partners.all(Service.LEARNER), [Service.ROLLOUT]):
            read = [
                one
                for one in partners.all(service)
                if reader in partners.readers(one, Service.LEARNER)
            ]
            assert read == [partners.partner(reader, service)]


def test_of_more_ranks_some_have_no_reader():
    partners = sides(1, 2)
    assert partners.readers(rollout(0), Service.LEARNER) == (learner(0),)
    assert partners.readers(rollout(1), Service.LEARNER) == ()
    assert partners.readers(learner(0), Service.ROLLOUT) == (rollout(0), rollout(1))


def test_services_that_are_not_named_have_one_rank():
    assert Partners().all(Service.BROKER) == (Participant(service=Service.BROKER),)
    assert sides(4, 4).partner(rollout(3), Service.BROKER).rank == 0


@pytest.mark.parametrize(("rank", "lease"), [(0, LeaseId(7)), (1, LeaseId(7)), (2, LeaseId(8))])
def test_a_view_has_the_leases_of_the_ranks_that_are_read(rank, lease):
    view = StepView(plan(), needs_reference=False, partners=sides(4, 2), whose=learner(rank))
    for sender, number in ((0, 7), (1, 8)):
        body = bodies.GroupGenerated(
            lease=LeaseId(number),
            response_tokens=4,
            decode_iteration=generated().decode_iteration,
            weights_version=plan().weights_version,
        )
        view.apply(said(body, 0, sender=rollout(sender)))
    assert view.groups[GroupId(0)].generated.lease == lease


@pytest.mark.parametrize("kv_heads", [2, 4, 8])
def test_where_any_rank_has_all_heads_of_another_the_partner_has_them(kv_heads):
    for train, rolled in DEGREES:
        partners = sides(train, rolled)
        for one in partners.all(Service.ROLLOUT):
            reader = Cut(one.rank, rolled)
            found = {
                rank: nested_heads(kv_heads, reader=reader, holder=Cut(rank, train))
                for rank in range(train)
            }
            partner = partners.partner(one, Service.LEARNER).rank
            assert (found[partner] is not None) == any(found.values())


def test_heads_are_counted_from_the_holders_first():
    assert nested_heads(4, reader=Cut(3, 4), holder=Cut(1, 2)) == (1, 2)
    assert nested_heads(4, reader=Cut(3, 4), holder=Cut(0, 2)) is None
    assert nested_heads(2, reader=Cut(1, 2), holder=Cut(2, 4)) == (0, 1)


def test_ranks_of_a_further_replica_are_counted_anew():
    partners = sides(2, 4, replicas=(2, 2))
    assert [partners.cut(one) for one in partners.all(Service.ROLLOUT, replica=1)] == [
        Cut(rank, 4) for rank in range(4)
    ]
    assert partners.partner(rollout(7), Service.LEARNER) == learner(3)
    assert partners.cut(learner(3)) == Cut(1, 2)


PAIRS = [(1, 1), (1, 3), (2, 1), (1, 2), (2, 4), (4, 2), (3, 3)]
"""Replicas of training and of the rollout."""


def bound(made, partners):
    """A plan whose groups are in turn the replicas'."""
    groups = {
        kind: tuple(
            replace(
                group,
                replica=partners.bound(group.group, Service.LEARNER),
                rollout_replica=partners.bound(group.group, Service.ROLLOUT),
            )
            for group in getattr(made, kind)
        )
        for kind in ("groups", "ahead")
    }
    return replace(made, **groups)


@pytest.mark.parametrize(
    ("replicas", "training", "rolled"),
    [
        ((1, 1), [0, 0, 0, 0], [0, 0, 0, 0]),
        ((1, 2), [0, 0, 0, 0], [0, 1, 0, 1]),
        ((2, 1), [0, 1, 0, 1], [0, 0, 0, 0]),
        ((2, 2), [0, 1, 0, 1], [0, 1, 0, 1]),
        ((2, 4), [0, 0, 1, 1], [0, 1, 2, 3]),
        ((4, 2), [0, 1, 2, 3], [0, 0, 1, 1]),
    ],
    ids=str,
)
def test_groups_are_in_turn_the_replicas_of_either_side(replicas, training, rolled):
    partners = sides(1, 1, replicas=replicas)
    assert [partners.bound(index, Service.LEARNER) for index in range(4)] == training
    assert [partners.bound(index, Service.REFERENCE) for index in range(4)] == training
    assert [partners.bound(index, Service.ROLLOUT) for index in range(4)] == rolled


@pytest.mark.parametrize("replicas", PAIRS, ids=str)
def test_a_group_stays_in_one_family_which_are_those_that_share_groups(replicas):
    partners = sides(2, 4, replicas=replicas)
    together = {
        (partners.bound(index, Service.LEARNER), partners.bound(index, Service.ROLLOUT))
        for index in range(12)
    }
    assert together == {
        (replica, met)
        for replica in range(replicas[0])
        for met in partners.met(learner(2 * replica), Service.ROLLOUT)
    }
    assert together == {
        (met, replica)
        for replica in range(replicas[1])
        for met in partners.met(rollout(4 * replica), Service.LEARNER)
    }
    assert partners.families == min(replicas)
    for replica, met in together:
        assert partners.family(learner(2 * replica)) == partners.family(rollout(4 * met))


def test_on_its_own_side_a_rank_works_with_its_own_replica():
    partners = sides(2, 4, replicas=(4, 2))
    encoder = Participant(service=Service.PREFIX_ENCODER, rank=5)
    assert partners.partner(encoder, Service.LEARNER) == learner(5)
    assert partners.partner(rollout(5), Service.ROLLOUT) == rollout(5)
    assert [one.rank for one in partners.everyone(Service.ROLLOUT)] == list(range(8))


@pytest.mark.parametrize("replicas", PAIRS, ids=str)
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_a_rank_is_read_by_those_whose_partner_it_is_in_every_replica(degrees, replicas):
    partners = sides(*degrees, replicas=replicas)
    for reader in partners.everyone(Service.LEARNER):
        own = partners.replica(reader)
        for replica in partners.met(reader, Service.ROLLOUT):
            partner = partners.partner(reader, Service.ROLLOUT, replica=replica)
            assert partners.replica(partner) == replica
            for one in partners.all(Service.ROLLOUT, replica=replica):
                readers = partners.readers(one, Service.LEARNER, replica=own)
                assert (reader in readers) == (one == partner)
