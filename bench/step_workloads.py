"""What one measured step consists of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.rl.lengths import LengthsConfig, response_lengths

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_FOLDER = Path(__file__).with_name("workloads")

MODELS: Mapping[str, Path] = {
    "3b": _FOLDER / "model_3b.toml",
    "7b": _FOLDER / "model_7b.toml",
}
"""Specifications by the shape of Qwen2.5-VL that they have."""
_THIN = _FOLDER / "model_thin.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One workload.

    Attributes:
        model: specification of the model folder.
        prompt_tokens: P of every prompt, exactly.
        frames: of the prompt's video; 1: a picture instead.
        grid: merged patches down and across of a frame.
        prompts: N of a step.
        samples: G of a prompt.
        lengths: of the responses.
        train_vision: whether the vision tower is trained.
        dtype: of the compute weights.
    """

    model: Path
    prompt_tokens: int
    frames: int
    grid: tuple[int, int]
    prompts: int
    samples: int
    lengths: LengthsConfig
    train_vision: bool
    dtype: str


def workload(name: str, *, scale: str, model: str = "3b") -> Workload:
    """The workload of that name at that scale.

    Args:
        name: a key of `WORKLOADS`.
        scale: `full`; `thin`, the 3B model's shape with few layers, for the first try of a machine;
            or `tiny` for a rehearsal on a CPU.
        model: a key of `MODELS`; the other scales have models of their own.
    """
    if scale == "tiny":
        return TINY[name]
    return replace(WORKLOADS[name], model=MODELS[model] if scale == "full" else _THIN)


def most_group_tokens(work: Workload, *, seed: int, steps: Iterable[int]) -> int:
    """Tokens of all responses of the group that has most in these steps."""
    return max(
        sum(response_lengths(work.lengths, seed=seed, step=step, group=group, samples=work.samples))
        for step in steps
        for group in range(work.prompts)
    )


def _full(
    *,
    prompt_tokens: int,
    frames: int,
    grid: tuple[int, int],
    lengths: LengthsConfig,
    train_vision: bool = False,
) -> Workload:
    return Workload(
        model=MODELS["3b"],
        prompt_tokens=prompt_tokens,
        frames=frames,
        grid=grid,
        prompts=8,
        samples=8,
        lengths=lengths,
        train_vision=train_vision,
        dtype="bfloat16",
    )


def _tiny(lengths: LengthsConfig, *, frames: int = 4, train_vision: bool = False) -> Workload:
    return Workload(
        model=_FOLDER / "model_tiny.toml",
        prompt_tokens=64,
        frames=frames,
        grid=(3, 4),
        prompts=3,
        samples=4,
        lengths=lengths,
        train_vision=train_vision,
        dtype="float32",
    )


_LONG_TAIL = LengthsConfig(kind="heavy-tail", max_tokens=1024, median_tokens=300)
_SHORT_TAIL = LengthsConfig(kind="heavy-tail", max_tokens=512, median_tokens=160)

WORKLOADS: Mapping[str, Workload] = {
    "A": _full(prompt_tokens=6144, frames=32, grid=(19, 20), lengths=_LONG_TAIL),
    "A2": _full(prompt_tokens=6144, frames=32, grid=(19, 20), lengths=_SHORT_TAIL),
    "B": _full(
        prompt_tokens=6144,
        frames=32,
        grid=(19, 20),
        lengths=LengthsConfig(kind="fixed", max_tokens=128),
    ),
    "C": _full(prompt_tokens=1024, frames=8, grid=(15, 16), lengths=_LONG_TAIL),
    "T": _full(
        prompt_tokens=6146,
        frames=1,
        grid=(78, 78),
        lengths=LengthsConfig(kind="fixed", max_tokens=256),
        train_vision=True,
    ),
}
"""A, A2, B: long video prompts; C: short ones, where overlap should hardly pay; T: one large
picture and a trained tower."""

TINY: Mapping[str, Workload] = {
    "A": _tiny(LengthsConfig(kind="heavy-tail", max_tokens=48, median_tokens=12)),
    "A2": _tiny(LengthsConfig(kind="heavy-tail", max_tokens=24, median_tokens=8)),
    "B": _tiny(LengthsConfig(kind="fixed", max_tokens=8)),
    "C": _tiny(LengthsConfig(kind="uniform", max_tokens=24)),
    "T": _tiny(LengthsConfig(kind="fixed", max_tokens=12), frames=1, train_vision=True),
}
