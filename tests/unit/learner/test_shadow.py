"""The two slots of the host shadow."""

from __future__ import annotations

import pytest
import torch

from common.errors import NotFound
from common.ids import WeightsVersion
from services.learner.shadow import HostShadow


def test_a_restored_state_equals_the_saved_one(tmp_path, make_state):
    saved, other = make_state(seed=1), make_state(seed=2)
    HostShadow(tmp_path, saved, rank=0).save(WeightsVersion(3))
    shadow = HostShadow(tmp_path, other, rank=0)
    shadow.restore(shadow.slot_name(WeightsVersion(3)))
    size = saved.layout.trainable_elements
    assert torch.equal(other.weights[:size], saved.weights[:size])
    assert torch.equal(other.moments, saved.moments)


def test_compute_weights_are_rebuilt_from_masters(tmp_path, make_state):
    saved, other = make_state(seed=1), make_state(seed=2, separate_masters=True)
    HostShadow(tmp_path, saved, rank=0).save(WeightsVersion(1))
    shadow = HostShadow(tmp_path, other, rank=0)
    shadow.restore(shadow.slot_name(WeightsVersion(1)))
    size = saved.layout.trainable_elements
    assert torch.equal(other.weights[:size], saved.weights[:size])


def test_the_older_slot_survives_the_next_save(tmp_path, make_state):
    state = make_state(seed=1)
    shadow = HostShadow(tmp_path, state, rank=0)
    shadow.save(WeightsVersion(4))
    before = state.masters.clone()
    state.masters.add_(1.0)
    shadow.save(WeightsVersion(5))
    shadow.restore(shadow.slot_name(WeightsVersion(4)))
    assert torch.equal(state.masters, before)


def test_restoring_does_not_change_the_slot(tmp_path, make_state):
    state = make_state()
    shadow = HostShadow(tmp_path, state, rank=0)
    shadow.save(WeightsVersion(0))
    path = tmp_path / shadow.slot_name(WeightsVersion(0))
    content = path.read_bytes()
    shadow.restore(path.name)
    state.masters.add_(1.0)
    assert path.read_bytes() == content


def test_a_lost_or_cut_slot_is_named(tmp_path, make_state):
    shadow = HostShadow(tmp_path, make_state(), rank=0)
    with pytest.raises(NotFound, match="rank0-slot1"):
        shadow.restore("rank0-slot1")
    shadow.save(WeightsVersion(1))
    path = tmp_path / "rank0-slot1"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(NotFound, match="bytes"):
        shadow.restore("rank0-slot1")
