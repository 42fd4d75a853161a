"""The model folder, the prompts and the recipes of a measurement."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from common.config.loading import check
from common.config.recipe import Recipe
from common.data.processor import PromptLimits, PromptProcessor
from common.errors import InvalidArgument
from common.step.schedule import Schedule
from common.vlm.initialise import initialise, load_spec
from common.vlm.loading import load_config, vision_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bench.step_workloads import Workload

SEED = 11
PER_RESPONSE = "serial-per-response"
"""`serial`, but training and scoring run the prefix once for each response."""
RESIDENT = "serial-resident"
"""`serial`, but optimizer state and reference weights never leave the device."""
BASELINES = (PER_RESPONSE, RESIDENT)
"""What `serial` is measured as besides."""
REWARD = "rollplex.verify.task:checksum_reward"
"""In [0, 1), by every byte of the response."""
KL_COEFFICIENT = 0.04
_QUESTION = "What is shown here? "


def make_model(work: Workload, folder: Path) -> Path:
    """Write the model folder, without weights: every run makes the same random ones."""
    return initialise(load_spec(work.model), folder, weights=False).path


def write_rows(
    work: Workload, model: Path, folder: Path, *, rows: int, clips: int | None = None
) -> Path:
    """Write prompts of random pixels that have exactly the workload's tokens.

    Args:
        rows: how many prompts.
        clips: how many different videos or pictures they take turns with; None: as many.
    Returns: a JSONL file as `[data] train` reads it.
    Raises: InvalidArgument if the pixels alone are more tokens than that.
    """
    folder.mkdir(parents=True)
    processor = PromptProcessor(model, PromptLimits(max_prompt_tokens=1 << 20))
    vision = vision_config(load_config(model))
    pixels = vision.patch_size * vision.spatial_merge_size
    shape = (work.frames, work.grid[0] * pixels, work.grid[1] * pixels, 3)
    digits: int | None = None
    lines: list[str] = []
    written: list[dict[str, Any]] = []
    for index in range(rows):
        generator = np.random.default_rng((SEED, index))
        if clips is None or index < clips:
            pixels_THWC = generator.integers(0, 256, size=shape, dtype=np.uint8)
            written.append(_media(folder, pixels_THWC, index))
        media = written[index % len(written)]
        if digits is None:
            # Every decimal digit is one token of the folder's tokenizer.
            row = _row(folder, media, _QUESTION, index)
            digits = work.prompt_tokens - len(processor.prepare(row, sample="0").prompt().token_ids)
            if digits < 0:
                raise InvalidArgument(
                    f"prompt_tokens = {work.prompt_tokens} with frames = {work.frames}, grid = "
                    f"{work.grid}: the shortest such prompt has {work.prompt_tokens - digits}"
                )
        text = _QUESTION + "".join(str(d) for d in generator.integers(0, 10, size=digits))
        lines.append(json.dumps(_row(None, media, text, index)))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def recipe(
    work: Workload,
    schedule: str,
    *,
    rollout: Mapping[str, Any] = MappingProxyType({}),
    model: Path,
    rows: Path,
    steps: int,
    checkpointing: bool,
    prefix_graphs: int | str,
    spill_optimizer: bool | str,
    ahead: bool,
    data_workers: int,
) -> Recipe:
    """A run of the workload under one schedule; all but the schedule are equal.

    Args:
        schedule: of `common.step.schedule`, or one of `BASELINES`.
        rollout: further keys of `[rollout]`: another engine than the project's own.
        spill_optimizer: as in the recipe; False: the reference's weights stay as well. `RESIDENT`
            is always so.
    """
    spill = spill_optimizer if schedule != RESIDENT else False
    tree = {
        "name": f"bench-{schedule}",
        "seed": SEED,
        "model": {
            "path": str(model),
            "weights": "random",
            "dtype": work.dtype,
            "train_vision": work.train_vision,
        },
        "data": {
            "train": str(rows),
            "max_prompt_tokens": work.prompt_tokens,
            "workers": data_workers,
            # Reading and cutting pixels is no part of what is measured: behind the warm-up every
            # prompt is one that was prepared before.
            "cache_mib": 8192,
        },
        "rollout": {
            "samples_per_group": work.samples,
            "max_new_tokens": work.lengths.max_tokens,
            "max_slots": work.prompts * work.samples,
            "lengths": work.lengths.model_dump(),
            **rollout,
        },
        "reward": {"functions": [{"function": REWARD}], "on_error": "stop"},
        "algorithm": {"kl_coefficient": KL_COEFFICIENT, "learning_rate": 1e-6},
        "training": {
            "schedule": Schedule.SERIAL if schedule in BASELINES else schedule,
            "share_prefix": schedule != PER_RESPONSE,
            "steps": steps,
            "prompts_per_step": work.prompts,
            "activation_checkpointing": checkpointing,
            "prefix_graphs": prefix_graphs,
            "spill_optimizer": spill,
            "spill_reference": spill and "auto",
            "ahead": ahead,
            "final_checkpoint": False,
            "host_shadow": False,
        },
    }
    return check(Recipe, tree, source="bench.step")


def _media(folder: Path, frames_THWC: np.ndarray, index: int) -> dict[str, Any]:
    """A content part; one frame is a picture. Its path is relative to the folder."""
    if len(frames_THWC) == 1:
        name = f"picture-{index}.png"
        Image.fromarray(frames_THWC[0]).save(folder / name, compress_level=1)
        return {"type": "image", "image": name}
    name = f"clip-{index}.npy"
    np.save(folder / name, frames_THWC)
    return {"type": "video", "video": name, "fps": 2.0}


def _row(folder: Path | None, media: dict[str, Any], text: str, index: int) -> dict[str, Any]:
    """Args: folder: put before the media's path; None: leave it relative."""
    kind = media["type"]
    part = media if folder is None else {**media, kind: str(folder / media[kind])}
    content = [part, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "index": index}
