"""Checkpoints: a folder that plain `transformers` loads, with the trainer's state beside it.

A checkpoint is written into a hidden folder beside its place, flushed, marked, and renamed; a
folder without the marker is never read. It is the same for every number of ranks: all of them give
what they have, and rank 0 writes.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from common.errors import InvalidArgument
from common.ids import WeightsVersion
from common.vlm.checkpoint import load_checkpoint, save_checkpoint
from common.vlm.files import CONFIG_FILE, INDEX_FILE
from common.worker.weights import MASTERS, MOMENTS

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import Qwen2_5_VLConfig

    from common.weights.layout import WeightLayout
    from services.learner.sharding import Sharding
    from services.learner.training_state import TrainingState

MARKER = "COMMITTED"
TRAINER_FOLDER = "trainer"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
FORMAT = 1
_PREFIX = "step-"


class CheckpointInvalid(InvalidArgument):
    """A folder that is no committed checkpoint of this model; the message says why."""


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        state: TrainingState,
        config: Qwen2_5_VLConfig,
        *,
        model_path: Path,
        sharding: Sharding | None = None,
    ) -> None:
        """Args:
        folder: holds one folder a checkpoint.
        state: what is saved and restored.
        config: of the model.
        model_path: where tokenizer and image processor are copied from.
        sharding: of a state that is spread over ranks; None: the state is whole.
        """
        self._folder = folder
        self._state = state
        self._config = config
        self._model_path = model_path
        self._sharding = sharding
        self._leads = sharding is None or sharding.leads

    def save(self, version: WeightsVersion, *, recipe_json: str, keep: int) -> Path:
        """Write the state as one committed checkpoint and remove the oldest beyond `keep`.

        Newer ones, of steps that are being run again, are neither counted nor removed. Every rank
        has to call this.

        Returns: its folder. A committed folder of this version is left as it is.
        """
        place = self._folder / f"{_PREFIX}{version:08d}"
        committed = (place / MARKER).is_file()
        if not committed and self._leads:
            # One process writes here at a time: what a killed one left behind is nobody's.
            for left in self._folder.glob(f".{_PREFIX}*"):
                shutil.rmtree(left)
            draft = self._folder / f".{place.name}"
            self._write(draft, version, recipe_json)
            shutil.rmtree(place, ignore_errors=True)
            draft.rename(place)
            _flush(self._folder)
        elif not committed:
            self._save_weights(self._folder)
            self._optimizer()
        if self._leads:
            self._prune(keep, newest=place)
        return place

    def load(self, folder: Path) -> None:
        """Fill the state from a committed checkpoint.

        Raises: CheckpointInvalid if it is not committed, of another format or another model.
        """
        version_of(folder)
        state, sharding = self._state, self._sharding
        if sharding is None:
            load_checkpoint(folder, state.layout, state.weights)
        else:
            sharding.load_weights(folder, state.weights)
        with safe_open(folder / TRAINER_FOLDER / OPTIMIZER_FILE, framework="pt") as file:
            for name, target in ((MASTERS, state.masters), (MOMENTS, state.moments)):
                saved = file.get_tensor(name)
                expected = (*target.shape[:-1], self._whole.trainable_elements)
                if saved.shape != expected:
                    raise CheckpointInvalid(
                        f"{folder}: {name} has shape {list(saved.shape)}; this run's model has "
                        f"{list(expected)}; was model.train_vision another?",
                        path=str(folder),
                    )
                if sharding is None:
                    target.copy_(saved)
                    continue
                width = saved.shape[-1]
                rows = target.view(-1, target.shape[-1])
                for values, row in zip(saved.view(-1, width), rows, strict=True):
                    sharding.take(values, row)
        state.weights_from_masters()

    def _write(self, draft: Path, version: WeightsVersion, recipe_json: str) -> None:
        self._save_weights(draft)
        for file in _companion_files(self._model_path):
            shutil.copy2(file, draft / file.name)
        trainer = draft / TRAINER_FOLDER
        trainer.mkdir()
        save_file(self._optimizer(), trainer / OPTIMIZER_FILE)
        facts = {
            "format": FORMAT,
            "weights_version": version,
            "layout": json.loads(self._whole.to_json()),
            "recipe": json.loads(recipe_json),
        }
        (trainer / STATE_FILE).write_text(json.dumps(facts, indent=2), encoding="utf-8")
        for path in [*trainer.iterdir(), *draft.iterdir()]:
            _flush(path)
        (draft / MARKER).touch()
        _flush(draft)

    @property
    def _whole(self) -> WeightLayout:
        return self._state.layout if self._sharding is None else self._sharding.whole

    def _save_weights(self, folder: Path) -> None:
        """Args: folder: where rank 0 writes to."""
        state = self._state
        if self._sharding is None:
            save_checkpoint(folder, self._config, state.layout, state.weights)
        else:
            self._sharding.save_weights(folder, state.weights)

    def _optimizer(self) -> dict[str, torch.Tensor]:
        """Masters and moments of the whole model, on the host; empty on all ranks but 0."""
        state, sharding = self._state, self._sharding
        if sharding is None:
            tensors = {MASTERS: state.masters.contiguous(), MOMENTS: state.moments.contiguous()}
            return {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        gathered = [sharding.gather(flat) for flat in (state.masters, *state.moments)]
        rows = [row for row in gathered if row is not None]
        return {MASTERS: rows[0], MOMENTS: torch.stack(rows[1:])} if rows else {}

    def _prune(self, keep: int, *, newest: Path) -> None:
        committed = sorted(
            path
            for path in self._folder.glob(f"{_PREFIX}*")
            if path.name <= newest.name and (path / MARKER).is_file()
        )
        for path in committed[:-keep]:
            shutil.rmtree(path)


def version_of(folder: Path) -> WeightsVersion:
    """The weights version of a committed checkpoint. Raises CheckpointInvalid."""
    if not (folder / MARKER).is_file():
        raise CheckpointInvalid(
            f"{folder} is no committed checkpoint: it has no file {MARKER}", path=str(folder)
        )
    path = folder / TRAINER_FOLDER / STATE_FILE
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(f"{path} cannot be read: {error}", path=str(path)) from error
    if facts.get("format") != FORMAT:
        raise CheckpointInvalid(
            f"{path}: format is {facts.get('format')!r}; this version reads {FORMAT}",
            path=str(path),
        )
    return WeightsVersion(int(facts["weights_version"]))


def _companion_files(model_path: Path) -> list[Path]:
    """Tokenizer, chat template, image processor: all but configuration and weights."""
    return [
        path
        for path in model_path.iterdir()
        if path.is_file()
        and path.suffix not in {".safetensors", ".bin", ".pt"}
        and path.name not in {CONFIG_FILE, INDEX_FILE, MARKER}
    ]


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
