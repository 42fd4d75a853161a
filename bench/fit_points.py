"""What is searched for: sizes of a workload, and how its memory is governed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from bench.fit_search import Search
from bench.step_inputs import SEED
from bench.step_plan import StepPlan
from bench.step_summary import vision_tokens
from bench.step_workloads import most_group_tokens
from common.vlm.initialise import load_spec

if TYPE_CHECKING:
    from pathlib import Path

    from bench.step_workloads import Workload

MOST_PROMPTS = 256
FRAMES_A_GRID = 2
"""Frames of a video that become one grid of tokens: an odd one is padded by its own copy."""


class Governing(StrEnum):
    """How a run's memory is governed; both are options of the recipe."""

    PHASES = "phases"
    """As Rollplex does: the optimizer's state leaves while no update needs it, and as many prefix
    graphs are kept as there is memory for."""
    RESIDENT = "resident"
    """The optimizer's state stays, and every prefix of the step keeps its graph."""

    @property
    def prefix_graphs(self) -> str:
        """Of the recipe."""
        return "auto" if self is Governing.PHASES else "all"

    @property
    def spill_optimizer(self) -> bool:
        """Of the recipe."""
        return self is Governing.PHASES


class Question(StrEnum):
    """What is made as large as fits."""

    PROMPT = "prompt"
    """A prompt's video, one grid at a time."""
    PROMPTS = "prompts"
    """The number of prompts a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One search.

    Attributes:
        model: a key of `bench.step_workloads.MODELS`.
        budget_gib: that has to be enough.
    """

    model: str
    question: Question
    governing: Governing
    budget_gib: float

    @property
    def name(self) -> str:
        """For a report."""
        return f"{self.model} {self.question} {self.governing} {self.budget_gib:g} GiB"


def sized(work: Workload, question: Question, size: int) -> Workload:
    """The workload with so many grids a prompt, or so many prompts a step.

    The text around a video keeps its length.
    """
    if question is Question.PROMPTS:
        return replace(work, prompts=size)
    text_tokens = work.prompt_tokens - vision_tokens(work)
    tokens = size * work.grid[0] * work.grid[1]
    return replace(work, frames=size * FRAMES_A_GRID, prompt_tokens=text_tokens + tokens)


def most(work: Workload, question: Question) -> int:
    """The largest size that the model has positions for; of prompts, `MOST_PROMPTS`."""
    if question is Question.PROMPTS:
        return MOST_PROMPTS
    text_tokens = work.prompt_tokens - vision_tokens(work)
    room = load_spec(work.model).text.max_positions - text_tokens - work.lengths.max_tokens
    return room // (work.grid[0] * work.grid[1])


def planned_largest(
    work: Workload, point: Point, *, model: Path, schedule: str, device: str, gpu: str, steps: int
) -> int | None:
    """The largest size that `rollplex plan` says fits; None: not even the smallest.

    Args:
        model: its folder.
        schedule: of `common.step.schedule`.
        steps: of a try, whose longest responses count.
    """
    search = Search(least=1, most=most(work, point.question), guess=1)
    while (size := search.next) is not None:
        asked = sized(work, point.question, size)
        planned = StepPlan(
            work=asked,
            group_tokens=most_group_tokens(asked, seed=SEED, steps=range(steps)),
            model=model,
            device=device,
            gpu=gpu,
            budget_gib=point.budget_gib,
            graphs=point.governing.prefix_graphs,
            spill_optimizer=point.governing.spill_optimizer,
        ).of(schedule)
        search.tell(size, fits=planned is not None and planned.fits)
    return search.largest
