from __future__ import annotations

import pytest

from common.config.base import ConfigError
from common.governor.table import H200, load_table


@pytest.mark.parametrize(
    ("rows", "share"), [(0, 132), (1, 66), (8, 66), (9, 66), (64, 66), (256, 66), (4000, 66)]
)
def test_the_share_is_the_one_of_the_greatest_gain(rows, share):
    assert H200.share_for(rows, total_sms=132) == share


def test_shares_are_scaled_to_another_gpu():
    assert H200.share_for(64, total_sms=66) == 33
    assert H200.share_for(0, total_sms=66) == 66
    assert H200.shares(total_sms=66) == (33, 66)


def test_rows_between_two_measurements_count_as_the_greater():
    assert H200.best(9).gain == 1.23
    assert H200.best(8).gain == 1.38
    assert H200.best(1000).gain == 1.07


def test_a_small_share_wins_where_it_was_measured_to(tmp_path):
    path = tmp_path / "table.toml"
    path.write_text(
        'device = "here"\ndevice_sms = 100\nentries = [\n'
        "  { rows = 4, sms = 80, gain = 1.3, background_rate = 0.8 },\n"
        "  { rows = 4, sms = 40, gain = 1.2, background_rate = 0.5 },\n"
        "  { rows = 16, sms = 80, gain = 1.1, background_rate = 0.8 },\n"
        "  { rows = 16, sms = 40, gain = 1.2, background_rate = 0.5 },\n]\n"
    )
    table = load_table(path)
    assert [table.share_for(rows, total_sms=100) for rows in (0, 3, 5)] == [100, 80, 40]
    assert table.shares(total_sms=100) == (40, 80, 100)
    assert table.best(5).decode_rate == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{ rows = 4, sms = 101, gain = 1.2, background_rate = 0.5 }", "device_sms"),
        ("{ rows = 4, sms = 40, gain = 0.4, background_rate = 0.5 }", "stand still"),
    ],
)
def test_impossible_tables_are_refused(tmp_path, entry, words):
    path = tmp_path / "table.toml"
    path.write_text(f'device = "here"\ndevice_sms = 100\nentries = [{entry}]\n')
    with pytest.raises(ConfigError, match=words):
        load_table(path)
