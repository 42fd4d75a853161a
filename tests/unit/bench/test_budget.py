"""The curve of step time over the memory budget."""

from __future__ import annotations

import pytest
from PIL import Image

from bench.budget_picture import curves, draw_curves
from bench.budgeted_node import Outcome

pytestmark = pytest.mark.usefixtures("drawing_fonts")


def point(schedule, budget_gib, outcome=Outcome.FITS, step_s=0.0):
    found = {"schedule": schedule, "budget_gib": budget_gib, "outcome": outcome, "reason": "why"}
    if outcome is Outcome.FITS:
        found |= {"step_s": step_s, "step_min_s": step_s - 1, "step_max_s": step_s + 1}
    return found


POINTS = [
    point("serial", 80.0, step_s=9.0),
    point("fused", 80.0, step_s=8.0),
    point("serial", 130.0, step_s=7.0),
    point("fused", 130.0, step_s=6.0),
    point("serial", 60.0, Outcome.FAILED),
    point("fused", 60.0, Outcome.TOO_LARGE),
]


def test_a_curve_is_one_schedule_by_falling_budget() -> None:
    fused, serial = sorted(curves(POINTS), key=lambda curve: curve.schedule)
    assert (serial.schedule, fused.schedule) == ("serial", "fused")
    assert (serial.budgets_gib, serial.step_s) == ([130.0, 80.0], [7.0, 9.0])
    assert (serial.low_s, serial.high_s) == ([6.0, 8.0], [8.0, 10.0])
    assert (fused.budgets_gib, fused.step_s) == ([130.0, 80.0], [6.0, 8.0])


def test_what_does_not_fit_is_marked_and_a_failure_is_not() -> None:
    found = {curve.schedule: curve.too_small_gib for curve in curves(POINTS)}
    assert found == {"serial": [], "fused": [60.0]}


def test_a_picture_is_drawn_even_if_nothing_fits(tmp_path) -> None:
    for name, points in (("all", POINTS), ("none", [point("serial", 60.0, Outcome.TOO_LARGE)])):
        path = tmp_path / f"{name}.png"
        draw_curves(curves(points), path, title=name)
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert min(picture.size) > 500
            colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
            assert (31, 119, 180) in colours  # the first schedule's line or mark
