"""Checkpoints: a folder that plain `transformers` loads, with the trainer's state beside it.

A checkpoint is written into a hidden folder beside its place, the optimizer's state part by part,
then flushed, marked, and renamed; a folder without the marker is never read.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

from common.ids import WeightsVersion
from common.vlm.checkpoint import load_checkpoint, save_checkpoint
from common.vlm.files import CONFIG_FILE, INDEX_FILE
from services.learner.optimizer_file import CheckpointInvalid, OptimizerFile

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import Qwen2_5_VLConfig

    from services.learner.training_state import StatePart, TrainingState

MARKER = "COMMITTED"
TRAINER_FOLDER = "trainer"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
FORMAT = 1
_PREFIX = "step-"


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(
        self, folder: Path, state: TrainingState, config: Qwen2_5_VLConfig, *, model_path: Path
    ) -> None:
        """Args:
        folder: holds one folder a checkpoint.
        state: what is saved and restored.
        config: of the model.
        model_path: where tokenizer and image processor are copied from.
        """
        self._folder = folder
        self._state = state
        self._config = config
        self._model_path = model_path

    def begin(self, version: WeightsVersion, *, recipe_json: str) -> OptimizerFile | None:
        """Write all of the state but its parts, which are to be written into the file returned.

        Returns: None: there is a committed folder of this version already, which stays as it is.
        """
        if (self._place(version) / MARKER).is_file():
            return None
        # One process writes here at a time: what a killed one left behind is nobody's.
        for left in self._folder.glob(f".{_PREFIX}*"):
            shutil.rmtree(left)
        draft, state = self._draft(version), self._state
        save_checkpoint(draft, self._config, state.layout, state.weights)
        for file in _companion_files(self._model_path):
            shutil.copy2(file, draft / file.name)
        trainer = draft / TRAINER_FOLDER
        trainer.mkdir()
        facts = {
            "format": FORMAT,
            "weights_version": version,
            "layout": json.loads(state.layout.to_json()),
            "recipe": json.loads(recipe_json),
        }
        (trainer / STATE_FILE).write_text(json.dumps(facts, indent=2), encoding="utf-8")
        optimizer = OptimizerFile(trainer / OPTIMIZER_FILE, state)
        optimizer.create()
        return optimizer

    def commit(self, version: WeightsVersion, *, keep: int) -> Path:
        """Flush, mark and rename what was begun, and remove the oldest beyond `keep`.

        Newer ones, of steps that are being run again, are neither counted nor removed.

        Returns: the version's folder.
        """
        place, draft = self._place(version), self._draft(version)
        if not (place / MARKER).is_file():
            for path in [*(draft / TRAINER_FOLDER).iterdir(), *draft.iterdir()]:
                _flush(path)
            (draft / MARKER).touch()
            _flush(draft)
            shutil.rmtree(place, ignore_errors=True)
            draft.rename(place)
            _flush(self._folder)
        self._prune(keep, newest=place)
        return place

    def load_weights(self, folder: Path) -> None:
        """Fill the compute weights from a committed checkpoint.

        Raises: CheckpointInvalid if it is not committed or of another format; what
            `load_checkpoint` does.
        """
        version_of(folder)
        load_checkpoint(folder, self._state.layout, self._state.weights)

    def load_part(self, folder: Path, part: StatePart) -> None:
        """Fill a part from a committed checkpoint, and rebuild its compute weights.

        Raises: CheckpointInvalid if it is of another model.
        """
        OptimizerFile(folder / TRAINER_FOLDER / OPTIMIZER_FILE, self._state).read(part)

    def _place(self, version: WeightsVersion) -> Path:
        return self._folder / f"{_PREFIX}{version:08d}"

    def _draft(self, version: WeightsVersion) -> Path:
        return self._folder / f".{self._place(version).name}"

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
