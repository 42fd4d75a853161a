"""Jobs on a share of the SMs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.governor.table import H200
from common.worker.governor import Governor

pytestmark = pytest.mark.gpu


class _Rows:
    value = 0


def _governor(rows: _Rows) -> Governor:
    unused: Any = None
    live: Any = rows
    return Governor(H200, torch.device("cuda", 0), live, unused)


def test_a_job_runs_on_the_share_of_the_live_batch() -> None:
    rows = _Rows()
    governor = _governor(rows)
    total = torch.cuda.get_device_properties(0).multi_processor_count
    whole, sms = governor.run(torch.cuda.current_stream)
    assert (whole, sms) == (torch.cuda.current_stream(), 0)
    rows.value = 64
    shared, sms = governor.run(torch.cuda.current_stream)
    assert shared != whole
    assert sms == H200.share_for(64, total_sms=total)
    assert torch.cuda.current_stream() == whole


def test_a_share_makes_large_products_slower() -> None:
    rows = _Rows()
    governor = _governor(rows)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def seconds() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            torch.mm(matrix, matrix)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    governor.run(seconds)
    whole_ms, _ = governor.run(seconds)
    rows.value = 64
    governor.run(seconds)
    shared_ms, _ = governor.run(seconds)
    assert shared_ms > 1.3 * whole_ms
