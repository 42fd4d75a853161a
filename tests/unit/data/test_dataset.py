"""What a recipe may name as data."""

from __future__ import annotations

import json

import pytest

from common.data.dataset import open_dataset
from common.errors import InvalidArgument

ROWS = [{"messages": [{"role": "user", "content": "a"}], "n": n} for n in range(3)]


def three_rows():
    return ROWS


def no_rows():
    return []


def a_generator():
    yield from ROWS


def broken():
    raise RuntimeError("disk on fire")


def test_a_function_of_a_module():
    dataset = open_dataset(f"{__name__}:three_rows", key="data.train")
    assert [dataset[i]["n"] for i in range(len(dataset))] == [0, 1, 2]


def test_a_function_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def rows():\n    return [{'n': 5}]\n")
    assert open_dataset(f"{file}:rows", key="data.train")[0] == {"n": 5}


def test_json_lines_with_paths_beside_the_file(tmp_path):
    content = [
        {"type": "image", "image": "a.png"},
        {"type": "image", "image": "/abs/b.png"},
        {"type": "video", "video": "c.npy"},
        {"type": "video", "video": ["d.png", "e.png"]},
        {"type": "text", "text": "image"},
    ]
    row = {"messages": [{"role": "user", "content": content}], "answer": "ü"}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"n": 0}) + "\n\n  \n" + json.dumps(row, ensure_ascii=False))
    dataset = open_dataset(str(file), key="data.train")
    assert len(dataset) == 2
    assert dataset[0] == {"n": 0}
    assert dataset[1]["answer"] == "ü"
    parts = dataset[1]["messages"][0]["content"]
    assert parts[0]["image"] == str(tmp_path / "a.png")
    assert parts[1]["image"] == "/abs/b.png"
    assert parts[2]["video"] == str(tmp_path / "c.npy")
    assert parts[3]["video"] == [str(tmp_path / "d.png"), str(tmp_path / "e.png")]
    assert parts[4] == {"type": "text", "text": "image"}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("examples.digits.data", "must have the form"),
        ("no_such_package.data:train", "cannot be imported"),
        ("/no/such/file.py:train", "cannot be imported"),
        (f"{__name__}:missing", "has no function 'missing'"),
        (f"{__name__}:no_rows", "has no rows"),
        (f"{__name__}:a_generator", "returned generator"),
        (f"{__name__}:broken", "raised RuntimeError: disk on fire"),
        ("/no/such/rows.jsonl", "cannot be read"),
    ],
)
def test_errors_name_key_value_and_cause(source, words):
    with pytest.raises(InvalidArgument, match=words) as caught:
        open_dataset(source, key="data.eval")
    assert "data.eval" in str(caught.value)
    assert source in str(caught.value)


def test_a_file_that_raises_at_import_is_not_half_imported(tmp_path):
    file = tmp_path / "fails.py"
    file.write_text("def rows():\n    return [1]\nraise ValueError('first time')\n")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="ValueError: first time"):
            open_dataset(f"{file}:rows", key="data.train")
