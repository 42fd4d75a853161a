"""Checkpoints are whole or not there."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

from common.ids import WeightsVersion
from common.weights.binding import views
from services.learner.checkpoints import MARKER, CheckpointStore, version_of
from services.learner.optimizer_file import CheckpointInvalid
from tests.unit.learner.conftest import add_to_masters, gaps_are_whole, masters_of, moments_of

RECIPE = json.dumps({"name": "r"})


class Whole(CheckpointStore):
    """A store that saves and loads all parts of its state."""

    def save(self, version, *, keep):
        version = WeightsVersion(version)
        file = self.begin(version, recipe_json=RECIPE)
        if file is not None:
            for part in self._state.parts:
                file.write(part)
        return self.commit(version, file, keep=keep)

    def load(self, folder):
        self.load_weights(folder)
        for part in self._state.parts:
            self.load_part(folder, part)


@pytest.fixture
def store(tmp_path, make_state, config, model_folder):
    def make(state):
        return Whole(tmp_path / "checkpoints", state, config, model_path=model_folder)

    return make


@pytest.mark.parametrize(("written", "read"), [(1, 1), (1, 3), (5, 1), (4, 3)])
@pytest.mark.parametrize("separate", [False, True])
def test_a_loaded_state_equals_the_saved_one(store, make_state, written, read, separate):
    """Whatever the parts, also with others than it was saved in."""
    saved = make_state(seed=1, parts=written, separate_masters=separate)
    other = make_state(seed=2, parts=read, separate_masters=separate)
    folder = store(saved).save(7, keep=2)
    store(other).load(folder)
    for name, tensor in views(saved.weights, saved.layout).items():
        assert torch.equal(views(other.weights, other.layout, [name])[name], tensor), name
    assert torch.equal(masters_of(other), masters_of(saved))
    assert torch.equal(moments_of(other), moments_of(saved))
    assert version_of(folder) == 7


@pytest.mark.parametrize(("written", "read"), [(True, False), (False, True), (True, True)])
def test_a_state_with_gaps_is_saved_and_loaded_as_one_without(store, make_state, written, read):
    saved, other = make_state(seed=1, parts=3, gaps=written), make_state(seed=2, parts=2, gaps=read)
    store(other).load(store(saved).save(7, keep=2))
    for name, tensor in saved.tensors.items():
        assert torch.equal(other.tensors[name], tensor), name
    assert torch.equal(masters_of(other), masters_of(saved))
    assert torch.equal(moments_of(other), moments_of(saved))
    assert gaps_are_whole(other) or not read


@pytest.mark.parametrize("parts", [1, 4])
def test_the_optimizers_file_is_the_one_that_safetensors_writes(store, make_state, tmp_path, parts):
    state = make_state(seed=4, parts=parts)
    folder = store(state).save(1, keep=1)
    whole = {"masters": masters_of(state), "moments": moments_of(state)}
    save_file(whole, tmp_path / "whole.safetensors")
    written = folder / "trainer" / "optimizer.safetensors"
    assert written.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_compute_weights_are_rebuilt_from_masters(store, make_state):
    saved = make_state(seed=1, parts=3, separate_masters=True)
    for part in saved.parts:
        add_to_masters(part, 0.25)
    other = make_state(seed=2, parts=2, separate_masters=True)
    store(other).load(store(saved).save(1, keep=1))
    assert torch.equal(other.weights[: other.layout.trainable_elements], masters_of(saved))


def test_plain_transformers_loads_it(store, make_state):
    state = make_state(seed=3)
    folder = store(state).save(1, keep=1)
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    weights = views(state.weights, state.layout)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_tokenizer_files_come_along_and_weights_of_the_base_do_not(store, make_state):
    folder = store(make_state()).save(1, keep=1)
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "model.safetensors").exists()


def test_a_folder_without_marker_is_refused(store, make_state):
    checkpoints = store(make_state())
    folder = checkpoints.save(1, keep=1)
    (folder / MARKER).unlink()
    with pytest.raises(CheckpointInvalid, match=MARKER):
        checkpoints.load(folder)


def test_an_unfinished_folder_is_replaced(store, make_state, tmp_path):
    checkpoints = store(make_state())
    folder = tmp_path / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (folder / "rubbish").touch()
    assert checkpoints.save(1, keep=1) == folder
    assert not (folder / "rubbish").exists()
    checkpoints.load(folder)


def test_only_the_newest_are_kept(store, make_state, tmp_path):
    checkpoints = store(make_state())
    for version in (1, 2, 3):
        checkpoints.save(version, keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000003"]


def test_newer_ones_of_steps_that_are_run_again_push_none_out(store, make_state, tmp_path):
    checkpoints = store(make_state())
    for version in (4, 8, 6):
        checkpoints.save(version, keep=1)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000006", "step-00000008"]


def test_what_a_killed_process_left_is_swept(store, make_state, tmp_path):
    left = tmp_path / "checkpoints" / ".step-00000003"
    left.mkdir(parents=True)
    (left / "model-00001-of-00001.safetensors").write_bytes(b"half")
    folder = store(make_state()).save(4, keep=1)
    assert list(folder.parent.iterdir()) == [folder]


def test_another_trainable_part_is_refused(store, make_state):
    folder = store(make_state()).save(1, keep=1)
    with pytest.raises(CheckpointInvalid, match="train_vision"):
        store(make_state(train_vision=True)).load(folder)


def test_another_format_is_refused(store, make_state):
    checkpoints = store(make_state())
    folder = checkpoints.save(1, keep=1)
    path = folder / "trainer" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(CheckpointInvalid, match="99"):
        version_of(folder)
