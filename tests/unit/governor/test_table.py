from __future__ import annotations

import pytest

from common.config.base import ConfigError
from common.governor.table import CoRun, CoRunTable, load_table
from common.step.tasks import Task
from tests.unit.governor.rates_of_tests import TABLE

TASK = Task.POLICY_PREFIX


def entry(rows: int, sms: int, gain: float, rate: float, task: Task | None = None) -> CoRun:
    return CoRun(rows=rows, sms=sms, gain=gain, background_rate=rate, task=task)


def table(*entries: CoRun, sms: int = 100) -> CoRunTable:
    return CoRunTable(device="here", device_sms=sms, entries=entries)


def test_rows_between_two_measurements_count_as_the_greater():
    assert [{entry.rows for entry in TABLE.beside(rows)} for rows in (1, 8, 9, 1000)] == [
        {8},
        {8},
        {64},
        {256},
    ]
    assert [entry.sms for entry in TABLE.beside(9)] == [46, 66, 92]
    assert TABLE.rates(TASK, 9, 66, total_sms=132) == TABLE.rates(TASK, 64, 66, total_sms=132)


def test_a_measured_share_has_the_measured_rates():
    rates = TABLE.rates(TASK, 64, 66, total_sms=132)
    assert rates.background == pytest.approx(0.59)
    assert rates.gain == pytest.approx(1.23)


def test_shares_are_scaled_to_another_gpu():
    assert TABLE.rates(TASK, 64, 33, total_sms=66) == TABLE.rates(TASK, 64, 66, total_sms=132)
    assert TABLE.shares(total_sms=132) == (46, 66, 92)
    assert TABLE.shares(total_sms=66) == (23, 33, 46)


def test_rates_go_in_straight_lines_between_shares_and_to_the_ends():
    known = table(entry(8, 40, 1.2, 0.4), entry(8, 80, 1.4, 0.8))

    def at(share: int) -> tuple[float, float]:
        rates = known.rates(TASK, 8, share, total_sms=100)
        return rates.decode, rates.background

    assert at(60) == pytest.approx((0.7, 0.6))
    assert at(20) == pytest.approx((0.9, 0.2))  # half way to none: 1 and 0
    assert at(90) == pytest.approx((0.3, 0.9))  # half way to all: 0 and 1
    assert at(100) == pytest.approx((0.01, 1.0))  # never quite nothing


def test_the_whole_gpu_is_as_measured_where_it_was():
    known = table(entry(8, 100, 1.3, 1.0))
    assert known.rates(TASK, 8, 100, total_sms=100).decode == pytest.approx(0.3)


def test_entries_of_a_kind_count_before_those_of_none():
    known = table(
        entry(8, 50, 1.1, 0.5),
        entry(8, 50, 1.4, 0.6, Task.RESPONSE_TRAIN),
        entry(8, 50, 1.2, 0.4, Task.REFERENCE_SCORE),
    )
    assert known.rates(Task.RESPONSE_TRAIN, 8, 50, total_sms=100).gain == pytest.approx(1.4)
    assert known.rates(Task.POLICY_PREFIX, 8, 50, total_sms=100).gain == pytest.approx(1.1)
    of_kinds = table(*known.entries[1:])
    assert of_kinds.rates(Task.POLICY_PREFIX, 8, 50, total_sms=100).gain == pytest.approx(1.3)


def test_a_table_is_read_from_toml(tmp_path):
    path = tmp_path / "table.toml"
    path.write_text(
        'device = "here"\ndevice_sms = 100\nentries = [\n'
        "  { rows = 4, sms = 80, gain = 1.3, background_rate = 0.8 },\n"
        '  { task = "reference_score", rows = 4, sms = 80, gain = 1.2, background_rate = 0.5 },\n'
        "]\n"
    )
    assert [found.task for found in load_table(path).entries] == [None, Task.REFERENCE_SCORE]


def test_what_two_tables_of_a_folder_have_is_their_mean(tmp_path):
    for number, one in enumerate((entry(8, 48, 1.25, 0.25), entry(8, 48, 1.5, 0.75))):
        (tmp_path / f"{number}.json").write_text(table(one).resolved_json())
    assert load_table(tmp_path).entries == (entry(8, 48, 1.375, 0.5),)


def test_the_tables_of_a_folder_are_read_as_one(tmp_path):
    parts = [table(entry(8, 48, 1.2, 0.4, task)) for task in (TASK, Task.REFERENCE_SCORE)]
    for number, part in enumerate(parts):
        (tmp_path / f"{number}.json").write_text(part.resolved_json())
    (tmp_path / "notes.txt").write_text("no table")
    assert load_table(tmp_path).entries == parts[0].entries + parts[1].entries


def test_tables_of_different_gpus_are_not_read_as_one(tmp_path):
    with pytest.raises(ConfigError, match=r"device_sms = \[\]"):
        load_table(tmp_path)
    for sms in (100, 132):
        part = table(entry(8, 48, 1.2, 0.4), sms=sms)
        (tmp_path / f"{sms}.json").write_text(part.resolved_json())
    with pytest.raises(ConfigError, match=r"device_sms = \[100, 132\]"):
        load_table(tmp_path)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ("{ rows = 4, sms = 101, gain = 1.2, background_rate = 0.5 }", "device_sms"),
        ("{ rows = 4, sms = 40, gain = 0.4, background_rate = 0.5 }", "stand still"),
        (", ".join(2 * ["{ rows = 4, sms = 40, gain = 1.2, background_rate = 0.5 }"]), "the same"),
    ],
)
def test_impossible_tables_are_refused(tmp_path, entries, words):
    path = tmp_path / "table.toml"
    path.write_text(f'device = "here"\ndevice_sms = 100\nentries = [{entries}]\n')
    with pytest.raises(ConfigError, match=words):
        load_table(path)
