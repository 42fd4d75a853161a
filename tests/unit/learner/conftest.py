"""A small model's training state in ordinary memory."""

from __future__ import annotations

import json

import pytest
import torch

from common.vlm.bound import bound_model
from common.vlm.tiny import tiny_config
from services.learner.training_state import TrainingState


@pytest.fixture
def config():
    return tiny_config()


@pytest.fixture
def make_state(config):
    def make(*, seed=0, separate_masters=False):
        bound = bound_model(config, dtype=torch.float32, train_vision=False, seed=seed)
        size = bound.layout.trainable_elements
        masters = bound.weights[:size]
        generator = torch.Generator().manual_seed(seed)
        return TrainingState(
            layout=bound.layout,
            weights=bound.weights,
            masters=masters.clone() if separate_masters else masters,
            moments=torch.rand((2, size), generator=generator),
            gradients=torch.zeros(size),
        )

    return make


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(json.dumps({"a": 1}))
    (folder / "model.safetensors").write_bytes(b"x")
    return folder
