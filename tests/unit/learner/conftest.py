"""A small model's training state in ordinary memory."""

from __future__ import annotations

import json

import pytest
import torch

from common.vlm.bound import bound_model
from common.vlm.tiny import tiny_config
from common.weights.cuts import cuts
from services.learner.training_state import StatePart, TrainingState


@pytest.fixture
def config():
    return tiny_config()


@pytest.fixture
def make_state(config):
    def make(*, seed=0, separate_masters=False, parts=1, train_vision=False, dtype=torch.float32):
        bound = bound_model(config, dtype=dtype, train_vision=train_vision, seed=seed)
        size = bound.layout.trainable_elements
        generator = torch.Generator().manual_seed(seed)
        moments = torch.rand((2, size), generator=generator)
        ranges = cuts(size, element_bytes=1 << 20, part_mib=-(-size // parts))
        assert len(ranges) == parts
        made = []
        for elements in ranges:
            weights = bound.weights[elements]
            masters = weights.float().clone() if separate_masters else weights
            made.append(
                StatePart(
                    elements=elements,
                    weights=weights,
                    masters=masters,
                    moments=moments[:, elements].clone(),
                )
            )
        return TrainingState(
            layout=bound.layout,
            weights=bound.weights,
            parts=tuple(made),
            gradients=torch.zeros(size),
        )

    return make


def masters_of(state):
    """[Et]"""
    return torch.cat([part.masters for part in state.parts])


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
