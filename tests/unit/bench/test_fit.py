"""The search for what fits, without services."""

from __future__ import annotations

import json

import pytest

from bench.fit import numbers
from bench.fit_points import Governing, Point, Question, most, planned_largest, sized
from bench.fit_search import Search
from bench.result_file import write_result
from bench.step_inputs import SEED
from bench.step_plan import StepPlan
from bench.step_summary import vision_tokens
from bench.step_workloads import most_group_tokens, workload
from common.vlm.published import PUBLISHED

WORK = workload("A2", scale="full")


def tries(search: Search, largest: int) -> list[int]:
    """Answers every question as if this were the largest size that fits."""
    asked = []
    while (size := search.next) is not None:
        asked.append(size)
        search.tell(size, fits=size <= largest)
    return asked


@pytest.mark.parametrize("guess", [-3, 1, 40, 64, 1000])
@pytest.mark.parametrize("largest", [0, 1, 2, 39, 40, 63, 64])
def test_the_largest_is_found_from_any_guess(largest: int, guess: int) -> None:
    search = Search(least=1, most=64, guess=guess)
    asked = tries(search, largest)
    assert search.largest == (largest or None)
    assert len(set(asked)) == len(asked)
    assert all(1 <= size <= 64 for size in asked)


def test_a_good_guess_costs_two_tries() -> None:
    assert tries(Search(least=1, most=300, guess=7), 7) == [7, 8]
    assert len(tries(Search(least=1, most=300, guess=100), 110)) <= 6


@pytest.mark.parametrize("largest", [0, 1, 57, 96, 100, 103, 250, 300])
def test_a_coarse_search_ends_near_the_largest(largest: int) -> None:
    search = Search(least=1, most=300, guess=100, resolution=0.05)
    asked = tries(search, largest)
    found = search.largest or 0
    assert found <= largest
    assert largest < (search.too_large or 301) <= max(found + 1, 1.05 * found)
    assert len(asked) <= 12
    if 96 <= largest < 104:
        assert len(asked) == 2


def test_bounds_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(ValueError, match="least = 2 is above most = 1"):
        Search(least=2, most=1, guess=1)


def test_a_longer_video_keeps_its_text() -> None:
    longer = sized(WORK, Question.PROMPT, 20)
    assert (longer.frames, longer.prompt_tokens) == (40, 6144 + 4 * 19 * 20)
    assert longer.prompt_tokens - vision_tokens(longer) == WORK.prompt_tokens - vision_tokens(WORK)
    assert sized(WORK, Question.PROMPT, 16) == WORK
    assert sized(WORK, Question.PROMPTS, 5).prompts == 5


def test_the_longest_prompt_leaves_positions_for_the_response() -> None:
    limit = most(WORK, Question.PROMPT)
    longest, beyond = (sized(WORK, Question.PROMPT, size) for size in (limit, limit + 1))
    assert longest.prompt_tokens + WORK.lengths.max_tokens <= 128000
    assert beyond.prompt_tokens + WORK.lengths.max_tokens > 128000


@pytest.mark.parametrize("question", list(Question))
@pytest.mark.parametrize("governing", list(Governing))
def test_the_planned_largest_is_the_last_that_fits(tmp_path, question, governing) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen2.5-vl-3b"]))
    point = Point(model="3b", question=question, governing=governing, budget_gib=110.0)
    found = planned_largest(
        WORK, point, model=tmp_path, schedule="rollplex", device="cuda", gpu="h200", steps=2
    )
    assert found is not None

    def fits(size: int) -> bool:
        work = sized(WORK, question, size)
        plan = StepPlan(
            work=work,
            group_tokens=most_group_tokens(work, seed=SEED, steps=range(2)),
            model=tmp_path,
            device="cuda",
            gpu="h200",
            budget_gib=110.0,
            graphs=governing.prefix_graphs,
            spill_optimizer=governing.spill_optimizer,
        )
        return plan.of("rollplex").fits

    assert fits(found)
    assert found == most(WORK, question) or not fits(found + 1)


def test_nothing_is_planned_to_fit_in_40_gib(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen2.5-vl-3b"]))
    point = Point(model="3b", question=Question.PROMPT, governing=Governing.PHASES, budget_gib=40.0)
    assert (
        planned_largest(
            WORK, point, model=tmp_path, schedule="rollplex", device="cuda", gpu="h200", steps=2
        )
        is None
    )


def test_budgets_are_positive_numbers() -> None:
    assert numbers("40,0.5") == [40.0, 0.5]
    with pytest.raises(ValueError):
        numbers("40,0")


def test_a_result_is_replaced_as_a_whole(tmp_path) -> None:
    path = tmp_path / "out.json"
    for points in ({}, {"a": 1}):
        write_result(path, {"points": points})
        assert json.loads(path.read_text()) == {"points": points}
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
