"""The folder that SGLang reads its model from: the policy's, without its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.rollout.engines.sglang.messages import PLACEHOLDER

_LEFT_OUT = (".safetensors", ".safetensors.index.json", ".bin", "generation_config.json")
"""Weights come from the broker; the recipe says how responses are sampled and where they end."""


def engine_folder(parent: Path, model_path: str | Path) -> Path:
    """Make the folder anew: links to the model's files, and one placeholder tensor.

    Args:
        parent: folder of the run.
        model_path: the policy's.
    """
    folder = parent / "sglang-model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in Path(model_path).absolute().iterdir():
        if path.is_file() and not path.name.endswith(_LEFT_OUT):
            (folder / path.name).symlink_to(path)
    save_file({PLACEHOLDER: torch.zeros(1)}, folder / "model.safetensors")
    return folder
