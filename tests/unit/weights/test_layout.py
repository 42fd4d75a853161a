from __future__ import annotations

import json
import subprocess
import sys

import pytest

from common.weights.errors import LayoutInvalid, MissingWeight
from common.weights.layout import ALIGNMENT_ELEMENTS, TensorSpec, WeightLayout

SPECS = [
    TensorSpec(name="frozen", shape=(3, 5), trainable=False, decay=False),
    TensorSpec(name="bias", shape=(7,), trainable=True, decay=False),
    TensorSpec(name="matrix", shape=(4, 4), trainable=True, decay=True),
    TensorSpec(name="other", shape=(2, 3), trainable=True, decay=True),
]


def test_regions_are_contiguous_and_aligned():
    layout = WeightLayout.build(SPECS, dtype="float32")
    assert layout.names == ("matrix", "other", "bias", "frozen")
    assert [e.offset_elements for e in layout.entries] == [0, 16, 32, 48]
    assert (layout.decay_elements, layout.trainable_elements, layout.total_elements) == (32, 48, 64)
    assert all(e.offset_elements % ALIGNMENT_ELEMENTS == 0 for e in layout.entries)


def test_nothing_trainable_has_empty_regions():
    layout = WeightLayout.build(SPECS[:1], dtype="bfloat16")
    assert (layout.decay_elements, layout.trainable_elements, layout.total_elements) == (0, 0, 16)


def test_json_round_trip():
    layout = WeightLayout.build(SPECS, dtype="float32", aliases={"head": "matrix"}, rank=1, world=2)
    again = WeightLayout.from_json(layout.to_json())
    assert again == layout
    assert again.to_json() == layout.to_json()


def test_select_follows_aliases_and_names_what_is_missing():
    layout = WeightLayout.build(SPECS, dtype="float32", aliases={"head": "matrix"})
    assert layout.select(["head"])["head"].name == "matrix"
    with pytest.raises(MissingWeight, match="absent"):
        layout.select(["bias", "absent"])


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        ([SPECS[0], SPECS[0]], {}, "two entries"),
        ([TensorSpec(name="x", shape=(1,), trainable=False, decay=True)], {}, "decay on a frozen"),
        (SPECS, {"aliases": {"head": "absent"}}, "alias of absent"),
        (SPECS, {"rank": 2, "world": 2}, "rank 2"),
    ],
)
def test_build_refuses(specs, options, message):
    with pytest.raises(LayoutInvalid, match=message):
        WeightLayout.build(specs, dtype="float32", **options)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("entries", 1, "offset_elements"), 8, "lies at 8"),
        (("entries", 1, "numel"), 5, "with 5 elements"),
        (("total_elements",), 65, "not 65"),
        (("decay_elements",), 16, "wrong region"),
        (("format",), 9, "format is 9"),
        (("entries",), None, "not a weight layout"),
    ],
)
def test_from_json_refuses(path, value, message):
    raw = json.loads(WeightLayout.build(SPECS, dtype="float32").to_json())
    target = raw
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(LayoutInvalid, match=message):
        WeightLayout.from_json(json.dumps(raw))


@pytest.mark.parametrize(
    "module", ["common.weights.layout", "common.vlm.files", "common.vlm.names"]
)
def test_needs_no_torch(module):
    code = (
        f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
