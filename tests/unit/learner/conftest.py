"""A small model's training state in ordinary memory."""

from __future__ import annotations

import json

import pytest
import torch

from common.layouts.storage import View
from common.vlm.bound import bound_model
from common.vlm.tiny import tiny_config
from common.weights.binding import views
from common.weights.cuts import cuts
from common.weights.placed import PlacedRange, placed
from common.weights.places import WeightPlaces
from services.learner.training_state import StatePart, TrainingState


@pytest.fixture
def config():
    return tiny_config()


FOREIGN = 77.0
"""In every gap."""


def with_gaps(layout):
    """Places of matrices whose rows have gaps behind them, and of vectors far from each other."""
    placed_views, end = {}, 0
    for entry in layout.entries:
        rows, row = entry.shape[0], entry.numel // entry.shape[0]
        if len(entry.shape) == 2:
            placed_views[entry.name] = View(end + row, (rows, row), (2 * row, 1))
        else:
            placed_views[entry.name] = View.plain(entry.shape, offset=end + 16)
        end += 2 * entry.numel + 32
    return WeightPlaces(layout=layout, views=placed_views, elements=end, gaps=True)


def gaps_are_whole(state):
    """Whether nothing was written in a gap."""
    held = sum(entry.numel for entry in state.layout.entries)
    return int((state.weights == FOREIGN).sum()) == state.places.elements - held


@pytest.fixture
def make_state(config):
    def make(
        *,
        seed=0,
        separate_masters=False,
        parts=1,
        train_vision=False,
        dtype=torch.float32,
        gaps=False,
    ):
        bound = bound_model(config, dtype=dtype, train_vision=train_vision, seed=seed)
        size = bound.layout.trainable_elements
        generator = torch.Generator().manual_seed(seed)
        moments = torch.rand((2, size), generator=generator)
        ranges = cuts(size, element_bytes=1 << 20, part_mib=-(-size // parts))
        assert len(ranges) == parts
        made = []
        places, flat = WeightPlaces.dense(bound.layout), bound.weights
        if gaps:
            places = with_gaps(bound.layout)
            flat = torch.full((places.elements,), FOREIGN, dtype=dtype)
            for name, values in views(bound.weights, bound.layout).items():
                placed(flat, places)[name].copy_(values)
        for elements in ranges:
            masters = bound.weights[elements].float() if separate_masters else None
            made.append(
                StatePart(
                    elements=elements,
                    weights=PlacedRange(flat, places, elements),
                    masters=masters,
                    moments=moments[:, elements].clone(),
                )
            )
        return TrainingState(
            layout=bound.layout,
            weights=flat,
            places=places,
            parts=tuple(made),
            gradients=torch.zeros(size),
        )

    return make


def masters_of(state):
    """[Et]"""
    return torch.cat([masters_of_part(part) for part in state.parts])


def masters_of_part(part):
    """[n], a copy."""
    masters = torch.zeros(part.moments.shape[1])
    part.read_masters(masters)
    return masters


def add_to_masters(part, number):
    """Without the compute weights, where those are others."""
    for _, masters in part.masters_in_place():
        masters.add_(number)


def moments_of(state):
    """[2, Et]"""
    return torch.cat([part.moments for part in state.parts], dim=1)


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(json.dumps({"a": 1}))
    (folder / "model.safetensors").write_bytes(b"x")
    return folder
