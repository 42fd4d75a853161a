"""The digits task."""

from __future__ import annotations

import numpy as np
import pytest

from examples.digits import data, reward


def test_train_and_held_out_rows_are_disjoint_and_complete():
    rows = [
        {split[i]["digits_row"] for i in range(len(split))}
        for split in (data.train(), data.held_out())
    ]
    assert len(rows[0]) == 1437
    assert len(rows[1]) == 360
    assert rows[0] | rows[1] == set(range(1797))


def test_rows_are_the_same_every_time_and_answers_fit_the_pictures():
    images, answers = data._source()
    for index in (0, 17, 359):
        row, again = data.held_out()[index], data.held_out()[index]
        picture = row["messages"][0]["content"][0]["image"]
        assert (picture == again["messages"][0]["content"][0]["image"]).all()
        assert picture.shape == (56, 56, 3)
        assert picture.dtype == np.uint8
        source = images[row["digits_row"]]
        assert (picture[3::7, 3::7, 1] == np.rint(source * 255 / 16)).all()
        assert row["answer"] == str(answers[row["digits_row"]])


def test_all_digits_are_held_out_about_equally():
    counts = np.bincount([int(data.held_out()[i]["answer"]) for i in range(360)], minlength=10)
    assert counts.min() > 20


@pytest.mark.parametrize(
    ("completion", "right", "form"),
    [("7", 1, 1), (" 7\n", 1, 1), ("3", 0, 1), ("77", 0, 0), ("", 0, 0), ("x", 0, 0), ("²", 0, 0)],
)
def test_rewards(completion, right, form):
    row = {"answer": "7"}
    assert reward.exact_match(completion, row) == right
    assert reward.is_digit(completion, row) == form
