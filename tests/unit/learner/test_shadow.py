"""The two slots of the host shadow."""

from __future__ import annotations

import pytest
import torch

from common.errors import NotFound
from common.ids import WeightsVersion
from services.learner.shadow import HostShadow
from tests.unit.learner.conftest import masters_of, moments_of


def save(folder, state, version):
    """All parts. Returns: the slot's name."""
    shadow = HostShadow(folder, state, rank=0)
    for part in state.parts:
        shadow.save(WeightsVersion(version), part)
    return shadow.slot_name(WeightsVersion(version))


def restore(folder, state, name):
    shadow = HostShadow(folder, state, rank=0)
    for part in state.parts:
        shadow.restore(name, part)


@pytest.mark.parametrize(("written", "read"), [(1, 1), (1, 4), (3, 1), (3, 2)])
def test_a_restored_state_equals_the_saved_one(tmp_path, make_state, written, read):
    saved, other = make_state(seed=1, parts=written), make_state(seed=2, parts=read)
    restore(tmp_path, other, save(tmp_path, saved, 3))
    size = saved.layout.trainable_elements
    assert torch.equal(other.weights[:size], saved.weights[:size])
    assert torch.equal(moments_of(other), moments_of(saved))


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
        part.masters.add_(1.0)
    save(tmp_path, state, 5)
    restore(tmp_path, state, older)
    assert torch.equal(masters_of(state), before)


def test_restoring_does_not_change_the_slot(tmp_path, make_state):
    state = make_state()
    path = tmp_path / save(tmp_path, state, 0)
    content = path.read_bytes()
    restore(tmp_path, state, path.name)
    for part in state.parts:
        part.masters.add_(1.0)
    assert path.read_bytes() == content


def test_a_lost_or_cut_slot_is_named(tmp_path, make_state):
    state = make_state()
    shadow = HostShadow(tmp_path, state, rank=0)
    with pytest.raises(NotFound, match="rank0-slot1"):
        restore(tmp_path, state, "rank0-slot1")
    path = tmp_path / save(tmp_path, state, 1)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(NotFound, match="bytes"):
        shadow.check("rank0-slot1")
