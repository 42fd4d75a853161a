"""Jobs on shares of the SMs, and what is measured of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from common.governor.choice import tried_shares
from common.governor.table import H200, load_table
from common.step.tasks import Task
from common.worker import sm_shares
from common.worker.governor import Governor
from common.worker.live_decode import LiveDecode
from common.worker.sm_token import SmToken

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.gpu

ROWS = 64
TASK = Task.RESPONSE_TRAIN


def _governor(live: LiveDecode, folder: Path, *, fixed: bool = False) -> Governor:
    record = folder / "learner.json"
    device = torch.device("cuda", 0)
    return Governor(H200, device, live, SmToken.private(), fixed=fixed, record=record)


@pytest.fixture
def live() -> LiveDecode:
    return LiveDecode.private()


def _beside(governor: Governor, job: Callable[[], Any], **options: Any) -> Any:
    return governor.run(TASK, job, **options)


def test_a_job_runs_on_a_share_while_something_decodes(live: LiveDecode, tmp_path: Path) -> None:
    governor = _governor(live, tmp_path)
    total = torch.cuda.get_device_properties(0).multi_processor_count
    own = torch.cuda.current_stream()
    whole = _beside(governor, torch.cuda.current_stream)
    assert (whole.value, whole.sms) == (own, 0)
    live.set_rows(ROWS)
    shared = _beside(governor, torch.cuda.current_stream)
    assert shared.value != own
    assert 0 < shared.sms < total
    assert torch.cuda.current_stream() == own
    # without the token it has to have the whole GPU
    assert _beside(governor, torch.cuda.current_stream, beside=False).sms == 0


def test_every_tried_share_is_made_as_it_was_asked_for(live: LiveDecode, tmp_path: Path) -> None:
    governor = _governor(live, tmp_path)
    total = torch.cuda.get_device_properties(0).multi_processor_count
    assert governor._judgement.shares.shares == tried_shares(total)


def test_a_table_that_is_named_decides_alone(live: LiveDecode, tmp_path: Path) -> None:
    governor = _governor(live, tmp_path, fixed=True)
    live.set_rows(ROWS)
    assert len({_beside(governor, lambda: None).sms for _ in range(20)}) == 1


def test_shares_are_tried_and_their_rates_written_down(live: LiveDecode, tmp_path: Path) -> None:
    governor = _governor(live, tmp_path)
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    governor._judgement.measured.add_alone(ROWS, 1e-4)

    def job() -> None:
        live.iterated()
        for _ in range(20):
            torch.mm(matrix, matrix)
        torch.cuda.current_stream().synchronize()
        live.iterated()

    for _ in range(6):
        _beside(governor, job)
    live.set_rows(ROWS)
    tried = set()
    for _ in range(60):
        live.iterated()
        tried.add(_beside(governor, job).sms)
    live.set_rows(0)
    governor.step_ended(0, window_closed=True)
    table = load_table(tmp_path / "learner.json")
    assert len(tried) > 1
    assert table.device_sms == torch.cuda.get_device_properties(0).multi_processor_count
    by_share = sorted(table.entries, key=lambda entry: entry.sms)
    assert {entry.sms for entry in by_share} <= tried
    assert len(by_share) > 1
    assert by_share[0].background_rate < by_share[-1].background_rate


def test_a_share_makes_large_products_slower(live: LiveDecode, tmp_path: Path) -> None:
    governor = _governor(live, tmp_path, fixed=True)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def milliseconds() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            torch.mm(matrix, matrix)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    _beside(governor, milliseconds)
    whole_ms = _beside(governor, milliseconds).value
    live.set_rows(ROWS)
    _beside(governor, milliseconds)
    assert _beside(governor, milliseconds).value > 1.3 * whole_ms


def test_where_memory_is_scarce_shares_do_not_each_keep_their_own(
    live: LiveDecode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sm_shares, "SCARCE_BYTES", torch.cuda.mem_get_info()[1])
    shares = _governor(live, tmp_path)._judgement.shares
    size = sm_shares.KEPT_BYTES + (1 << 30)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for share in shares.shares:
        shares.run(share, lambda: torch.empty(size, dtype=torch.uint8, device="cuda").fill_(1))
    assert torch.cuda.memory_reserved() - before < 2 * size
