"""The two slots of the host shadow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.errors import NotFound
from common.ids import WeightsVersion
from common.step.place import Place
from services.learner.shadow import HostShadow
from tests.unit.learner.conftest import add_to_masters, gaps_are_whole, masters_of, moments_of


def save(folder, state, version):
    """All parts. Returns: the slot's name."""
    shadow = HostShadow(folder, state, place=Place())
    shadow.begin(WeightsVersion(version))
    for part in state.parts:
        shadow.save(part)
    shadow.finish(WeightsVersion(version))
    return shadow.slot_name(WeightsVersion(version))


def restore(folder, state, name):
    shadow = HostShadow(folder, state, place=Place())
    for part in state.parts:
        shadow.restore(name, part)


@pytest.mark.parametrize(("written", "read"), [(1, 1), (1, 4), (3, 1), (3, 2)])
def test_a_restored_state_equals_the_saved_one(tmp_path, make_state, written, read):
    saved, other = make_state(seed=1, parts=written), make_state(seed=2, parts=read)
    restore(tmp_path, other, save(tmp_path, saved, 3))
    size = saved.layout.trainable_elements
    assert torch.equal(other.weights[:size], saved.weights[:size])
    assert torch.equal(moments_of(other), moments_of(saved))


@pytest.mark.parametrize("separate", [False, True])
def test_weights_with_gaps_are_saved_and_restored_as_those_without(tmp_path, make_state, separate):
    kind = {"parts": 3, "separate_masters": separate}
    saved, other = make_state(seed=1, gaps=True, **kind), make_state(seed=2, gaps=True, **kind)
    before = dict(other.tensors)["model.visual.patch_embed.proj.weight"].clone()
    restore(tmp_path, other, save(tmp_path, saved, 3))
    for entry in saved.layout.trainable_entries:
        assert torch.equal(other.tensors[entry.name], saved.tensors[entry.name]), entry.name
    assert torch.equal(moments_of(other), moments_of(saved))
    assert torch.equal(other.tensors["model.visual.patch_embed.proj.weight"], before)
    assert gaps_are_whole(other)


def test_compute_weights_are_rebuilt_from_masters(tmp_path, make_state):
    saved = make_state(seed=1, parts=2)
    other = make_state(seed=2, separate_masters=True, parts=3)
    restore(tmp_path, other, save(tmp_path, saved, 1))
    size = saved.layout.trainable_elements
    assert torch.equal(other.weights[:size], saved.weights[:size])
    assert torch.equal(masters_of(other), masters_of(saved))


def test_the_older_slot_survives_the_next_save(tmp_path, make_state):
    state = make_state(seed=1, parts=2)
    older = save(tmp_path, state, 4)
    before = masters_of(state)
    for part in state.parts:
        add_to_masters(part, 1.0)
    save(tmp_path, state, 5)
    restore(tmp_path, state, older)
    assert torch.equal(masters_of(state), before)


def test_restoring_does_not_change_the_slot(tmp_path, make_state):
    state = make_state()
    path = tmp_path / save(tmp_path, state, 0)
    content = path.read_bytes()
    restore(tmp_path, state, path.name)
    for part in state.parts:
        add_to_masters(part, 1.0)
    assert path.read_bytes() == content


def test_a_lost_or_cut_slot_is_named(tmp_path, make_state):
    state = make_state()
    shadow = HostShadow(tmp_path, state, place=Place())
    with pytest.raises(NotFound, match="rank0of1-v1"):
        restore(tmp_path, state, "rank0of1-v1")
    path = tmp_path / save(tmp_path, state, 1)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(NotFound, match="bytes"):
        shadow.check("rank0of1-v1")


def test_a_version_that_was_not_finished_is_none(tmp_path, make_state):
    state = make_state(seed=1, parts=2)
    first = save(tmp_path, state, 3)
    shadow = HostShadow(tmp_path, state, place=Place())
    shadow.begin(WeightsVersion(4))
    shadow.save(state.parts[0])
    with pytest.raises(NotFound):
        shadow.check(shadow.slot_name(WeightsVersion(4)))
    shadow.check(first)
    # What comes next takes the draft over.
    save(tmp_path, state, 4)
    assert {path.name for path in tmp_path.iterdir()} == {"rank0of1-v3", "rank0of1-v4"}


def test_a_version_of_a_later_past_does_not_come_back(tmp_path, make_state):
    state = make_state(seed=1, parts=2)
    later = save(tmp_path, state, 8)
    # The run has gone back to a checkpoint of version 5.
    shadow = HostShadow(tmp_path, state, place=Place())
    shadow.begin(WeightsVersion(6))
    with pytest.raises(NotFound):
        shadow.check(later)


def test_slots_of_another_number_of_ranks_make_room(tmp_path, make_state):
    whole, half = make_state(seed=1, parts=2), make_state(seed=2, parts=1)
    save(tmp_path, whole, 1)
    shadow = HostShadow(tmp_path, half, place=Place(degree=2))
    for version in (2, 3):
        shadow.begin(WeightsVersion(version))
        shadow.save(half.parts[0])
        shadow.finish(WeightsVersion(version))
    assert {path.name for path in tmp_path.iterdir()} == {"rank0of2-v2", "rank0of2-v3"}
    for name in ("rank0of2-v2", "rank0of2-v3"):
        shadow.restore(name, half.parts[0])


def test_each_replica_saves_its_share(tmp_path, make_state):
    saved, other = make_state(seed=1, parts=7), make_state(seed=2, parts=7)
    shares = (slice(0, 3), slice(3, 7))
    for replica, parts in enumerate(shares):
        place = Place(rank=replica, replicas=2)
        state = replace(saved, parts=saved.parts[parts])
        shadow = HostShadow(tmp_path, state, place=place)
        version = WeightsVersion(1)
        shadow.begin(version)
        for part in state.parts:
            shadow.save(part)
        shadow.finish(version)
        own = state.own.stop - state.own.start
        name = f"rank{replica}of1x2-v1"
        assert (tmp_path / name).stat().st_size == 3 * own * saved.dtype.itemsize
        target = replace(other, parts=other.parts[parts])
        for part in target.parts:
            HostShadow(tmp_path, target, place=place).restore(name, part)
    assert {path.name for path in tmp_path.iterdir()} == {"rank0of1x2-v1", "rank1of1x2-v1"}
    assert torch.equal(masters_of(other), masters_of(saved))
    assert torch.equal(moments_of(other), moments_of(saved))
