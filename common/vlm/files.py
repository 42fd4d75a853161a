"""What a model folder has to contain. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.vlm.errors import ModelFilesError

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
IMAGE_PROCESSOR_FILE = "preprocessor_config.json"
COMBINED_PROCESSOR_FILE = "processor_config.json"
"""Where newer saves put the image processor's settings, under ``image_processor``."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in this file.

    Raises: ModelFilesError if it is absent, unreadable or no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFilesError(f"cannot read {path}: {error.strerror}", path=str(path)) from error
    except ValueError as error:
        raise ModelFilesError(f"{path} is not JSON: {error}", path=str(path)) from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} holds no JSON object", path=str(path))
    return content


def model_folder(path: str | Path) -> Path:
    """The folder, once it is known to be one.

    Raises: ModelFilesError if there is no such folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelFilesError(f"model folder {folder} does not exist", path=str(folder))
    return folder


def weight_files(path: str | Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder, all of them present.

    Raises: ModelFilesError naming the file that is absent.
    """
    folder = model_folder(path)
    if (single := folder / SINGLE_FILE).is_file():
        return (single,)
    index = folder / INDEX_FILE
    if not index.is_file():
        raise ModelFilesError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}", path=str(folder)
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFilesError(f"{index} has no weight_map", path=str(index))
    shards = tuple(folder / name for name in sorted(set(weight_map.values())))
    for shard in shards:
        if not shard.is_file():
            raise ModelFilesError(f"{index} names {shard.name}, which is absent", path=str(shard))
    return shards


def check_model_files(path: str | Path, *, weights: bool = True) -> None:
    """Fail early, with the file's name, if a model folder cannot serve a run.

    Asks for the configuration, a tokenizer, the image processor's settings, and all weights.

    Args:
        weights: False: whether there are weights does not matter.
    Raises: ModelFilesError.
    """
    folder = model_folder(path)
    read_json(folder / CONFIG_FILE)
    fast = (folder / "tokenizer.json").is_file()
    if not fast and not all((folder / name).is_file() for name in ("vocab.json", "merges.txt")):
        raise ModelFilesError(
            f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt",
            path=str(folder / "tokenizer.json"),
        )
    if not (folder / IMAGE_PROCESSOR_FILE).is_file():
        combined = folder / COMBINED_PROCESSOR_FILE
        if not combined.is_file() or "image_processor" not in read_json(combined):
            raise ModelFilesError(
                f"{folder} has no image processor: neither {IMAGE_PROCESSOR_FILE} nor "
                f"{COMBINED_PROCESSOR_FILE} with image_processor",
                path=str(folder / IMAGE_PROCESSOR_FILE),
            )
    if weights:
        weight_files(folder)
