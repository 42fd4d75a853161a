"""Rates of moves, from a step's metrics."""

from __future__ import annotations

import pytest

from bench.moves import move_figures

STEP = {
    "policy_optimizer_spilled_bytes": 40e9,
    "time_policy_optimizer_spill_s": 0.8,
    "policy_optimizer_restored_bytes": 40e9,
    "time_policy_optimizer_restore_s": 1.0,
    "reference_weights_spilled_bytes": 8e9,
    "time_reference_weights_spill_s": 0.001,
}


def test_a_rate_is_bytes_over_seconds_and_its_share_of_a_plain_copy() -> None:
    assert move_figures(STEP) == pytest.approx(
        {"policy_optimizer_spill_gb_per_s": 50.0, "policy_optimizer_restore_gb_per_s": 40.0}
    )
    shares = move_figures(STEP, {"to_host": 62.5, "to_device": 50.0})
    assert shares["policy_optimizer_spill_over_pinned"] == pytest.approx(0.8)
    assert shares["policy_optimizer_restore_over_pinned"] == pytest.approx(0.8)


def test_what_did_not_move_has_no_rate() -> None:
    assert move_figures({}) == {}
    assert move_figures(dict.fromkeys(STEP, 0.0), {"to_host": 1.0, "to_device": 1.0}) == {}
