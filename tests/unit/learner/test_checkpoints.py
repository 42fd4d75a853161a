"""Checkpoints are whole or not there."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForImageTextToText

from common.ids import WeightsVersion
from common.weights.binding import views
from services.learner.checkpoints import MARKER, CheckpointInvalid, CheckpointStore, version_of

RECIPE = json.dumps({"name": "r"})


@pytest.fixture
def store(tmp_path, make_state, config, model_folder):
    def make(state):
        return CheckpointStore(tmp_path / "checkpoints", state, config, model_path=model_folder)

    return make


def test_a_loaded_state_equals_the_saved_one(store, make_state):
    saved, other = make_state(seed=1), make_state(seed=2)
    folder = store(saved).save(WeightsVersion(7), recipe_json=RECIPE, keep=2)
    store(other).load(folder)
    for name, tensor in views(saved.weights, saved.layout).items():
        assert torch.equal(views(other.weights, other.layout, [name])[name], tensor), name
    assert torch.equal(other.moments, saved.moments)
    assert version_of(folder) == 7


def test_plain_transformers_loads_it(store, make_state):
    state = make_state(seed=3)
    folder = store(state).save(WeightsVersion(1), recipe_json=RECIPE, keep=1)
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    weights = views(state.weights, state.layout)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_tokenizer_files_come_along_and_weights_of_the_base_do_not(store, make_state):
    folder = store(make_state()).save(WeightsVersion(1), recipe_json=RECIPE, keep=1)
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "model.safetensors").exists()


def test_a_folder_without_marker_is_refused(store, make_state):
    checkpoints = store(make_state())
    folder = checkpoints.save(WeightsVersion(1), recipe_json=RECIPE, keep=1)
    (folder / MARKER).unlink()
    with pytest.raises(CheckpointInvalid, match=MARKER):
        checkpoints.load(folder)


def test_an_unfinished_folder_is_replaced(store, make_state, tmp_path):
    checkpoints = store(make_state())
    folder = tmp_path / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (folder / "rubbish").touch()
    assert checkpoints.save(WeightsVersion(1), recipe_json=RECIPE, keep=1) == folder
    assert not (folder / "rubbish").exists()
    checkpoints.load(folder)


def test_only_the_newest_are_kept(store, make_state, tmp_path):
    checkpoints = store(make_state())
    for version in (1, 2, 3):
        checkpoints.save(WeightsVersion(version), recipe_json=RECIPE, keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000003"]


def test_newer_ones_of_steps_that_are_run_again_push_none_out(store, make_state, tmp_path):
    checkpoints = store(make_state())
    for version in (4, 8, 6):
        checkpoints.save(WeightsVersion(version), recipe_json=RECIPE, keep=1)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000006", "step-00000008"]


def test_what_a_killed_process_left_is_swept(store, make_state, tmp_path):
    left = tmp_path / "checkpoints" / ".step-00000003"
    left.mkdir(parents=True)
    (left / "model-00001-of-00001.safetensors").write_bytes(b"half")
    folder = store(make_state()).save(WeightsVersion(4), recipe_json=RECIPE, keep=1)
    assert list(folder.parent.iterdir()) == [folder]


def test_another_trainable_part_is_refused(store, make_state, config, tmp_path, model_folder):
    from common.vlm.bound import bound_model
    from services.learner.training_state import TrainingState

    folder = store(make_state()).save(WeightsVersion(1), recipe_json=RECIPE, keep=1)
    bound = bound_model(config, dtype=torch.float32, train_vision=True)
    size = bound.layout.trainable_elements
    state = TrainingState(
        layout=bound.layout,
        weights=bound.weights,
        masters=bound.weights[:size],
        moments=torch.zeros((2, size)),
        gradients=torch.zeros(size),
    )
    with pytest.raises(CheckpointInvalid, match="train_vision"):
        CheckpointStore(tmp_path, state, config, model_path=model_folder).load(folder)


def test_another_format_is_refused(store, make_state):
    checkpoints = store(make_state())
    folder = checkpoints.save(WeightsVersion(1), recipe_json=RECIPE, keep=1)
    path = folder / "trainer" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(CheckpointInvalid, match="99"):
        version_of(folder)
