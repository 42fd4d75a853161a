from __future__ import annotations

import pytest

from bench.step_bound import WindowPart, bound_s, window_parts
from common.governor.table import CoRun, CoRunTable

TABLE = CoRunTable(
    device="here",
    device_sms=100,
    entries=(
        CoRun(rows=4, sms=50, gain=1.5, background_rate=0.5),
        CoRun(rows=64, sms=50, gain=1.2, background_rate=0.4),
    ),
)
SERIAL = {
    "step_s": 20.0,
    "window_s": 6.0,
    "time_admit_s": 2.0,
    "time_policy_prefix_s": 1.0,
    "time_reference_prefix_s": 1.0,
    "time_reference_score_s": 1.0,
    "time_response_train_s": 3.0,
    "time_prefix_backward_s": 1.0,
}


def window(*parts):
    """One step's, each part as its rows, the groups that have ended, its iterations."""
    return [[WindowPart(rows=rows, ended=ended, iterations=count) for rows, ended, count in parts]]


def test_a_window_is_cut_where_a_response_ends():
    assert window_parts([[3, 1], [3, 2]]) == (
        WindowPart(rows=4, ended=0, iterations=1),
        WindowPart(rows=3, ended=0, iterations=1),
        WindowPart(rows=2, ended=0, iterations=1),
    )
    assert window_parts([[1, 1], [3, 2]]) == (
        WindowPart(rows=4, ended=0, iterations=1),
        WindowPart(rows=2, ended=1, iterations=1),
        WindowPart(rows=1, ended=1, iterations=1),
    )


def test_serial_is_its_own_bound():
    assert (
        bound_s(
            "serial", SERIAL, table=TABLE, windows=window((4, 0, 1)), prompts=4, train_vision=True
        )
        == 20.0
    )


def test_work_beside_a_small_batch_saves_the_gain():
    # 2 s of prefixes beside 4 rows: each second saves (1.5 - 1) / 0.5 of itself.
    bound = bound_s(
        "rollplex", SERIAL, table=TABLE, windows=window((3, 0, 10)), prompts=4, train_vision=True
    )
    assert bound == pytest.approx(20 - 2 * 1.0)


def test_the_window_holds_only_so_much():
    long = SERIAL | {"time_policy_prefix_s": 100.0}
    # 6 s at a decode rate of 1.0 take 6 s, in which 0.5 x 6 s of work is done.
    bound = bound_s(
        "rollplex", long, table=TABLE, windows=window((3, 0, 10)), prompts=4, train_vision=True
    )
    assert bound == pytest.approx(20 - 3 * 1.0)


def test_the_iterations_that_save_most_are_filled_first():
    # half of the window has 4 rows and room for 1.5 s; the rest goes beside 64 rows at 0.5.
    bound = bound_s(
        "rollplex",
        SERIAL,
        table=TABLE,
        windows=window((64, 0, 5), (4, 0, 5)),
        prompts=4,
        train_vision=True,
    )
    assert bound == pytest.approx(20 - 1.5 * 1.0 - 0.5 * 0.5)


def test_fused_leaves_out_one_prefill_and_moves_what_groups_have_ended():
    ended = window((64, 3, 1))
    bound = bound_s("fused", SERIAL, table=TABLE, windows=ended, prompts=4, train_vision=True)
    # left out: min(2, 1); movable: 1 + 5 x 3/4, room: 0.4 x 6 / 0.8 = 3.
    assert bound == pytest.approx(20 - 1 - 3 * 0.5)
    none = window((64, 0, 1))
    bound = bound_s("fused", SERIAL, table=TABLE, windows=none, prompts=4, train_vision=True)
    assert bound == pytest.approx(20 - 1 - 1 * 0.5)


def test_work_of_a_group_is_not_moved_before_its_end():
    # Beside 4 rows, where 3 s fit in 6, one of four groups ends after 5/6 of the window.
    late = window((4, 0, 5), (3, 1, 1))
    bound = bound_s("fused", SERIAL, table=TABLE, windows=late, prompts=4, train_vision=True)
    # 1 s anywhere, and of 5/4 s what the last 1 s has room for.
    assert bound == pytest.approx(20 - 1 - (1 + 0.5) * 1.0)


def test_the_mean_of_the_steps_counts():
    steps = window((4, 0, 1)) + window((64, 0, 1))
    bound = bound_s("rollplex", SERIAL, table=TABLE, windows=steps, prompts=4, train_vision=True)
    assert bound == pytest.approx(20 - (2 * 1.0 + 2 * 0.5) / 2)


def test_the_next_steps_vision_may_go_ahead_where_the_tower_is_frozen():
    serial = SERIAL | {"time_policy_vision_s": 1.0}
    trained, frozen = (
        bound_s(
            "rollplex",
            serial,
            table=TABLE,
            windows=window((3, 0, 10)),
            prompts=4,
            train_vision=trains,
        )
        for trains in (True, False)
    )
    assert trained - frozen == pytest.approx(1.0)


def test_shares_are_mixed_so_that_the_work_just_fills_the_window():
    small = CoRun(rows=4, sms=20, gain=1.1, background_rate=0.2)
    large = CoRun(rows=4, sms=80, gain=1.2, background_rate=0.7)
    table = CoRunTable(device="here", device_sms=100, entries=(small, large))
    # x and y seconds on them: 0.9 x + 0.5 y = 6 of decode, 0.2 x + 0.7 y = 2 of work.
    y = (2 - 0.2 * 6 / 0.9) / (0.7 - 0.2 * 0.5 / 0.9)
    x = (6 - 0.5 * y) / 0.9
    bound = bound_s(
        "rollplex", SERIAL, table=table, windows=window((4, 0, 1)), prompts=4, train_vision=True
    )
    assert bound == pytest.approx(20 - 0.1 * x - 0.2 * y)
