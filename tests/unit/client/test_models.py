from __future__ import annotations

from rollplex.models import RunState


def test_a_run_waits_or_is_at_work_or_has_ended():
    for state in RunState:
        assert (state is RunState.PENDING) + state.at_work + state.ended == 1, state
