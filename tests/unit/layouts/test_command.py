"""`rollplex layout`: what it prints, as text and as JSON, and its errors."""

from __future__ import annotations

import json

import pytest

from rollplex.cli.__main__ import main

EXAMPLE = ["layout", "--model", "qwen2.5-vl-32b", "--train-tp", "8", "--rollout-tp", "4"]


def printed(capsys, *arguments):
    assert main([*EXAMPLE, *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_json(capsys):
    made = json.loads(printed(capsys, "--json", "--tensors", "--gpus", "16"))
    assert made["train"] == {"layout": "native", "tp": 8}
    assert made["rollout"] == {"layout": "sglang", "tp": 4}
    assert [rank["gpu"] for rank in made["ranks"]] == list(range(16))
    assert {rank["rollout_replica"] for rank in made["ranks"]} == {0, 1, 2, 3}
    for key in ("alias_bytes", "gather_bytes", "rebuild_bytes", "full_second_copy_bytes"):
        assert made[key] == sum(rank[key] for rank in made["ranks"])
    for key in ("alias_bytes", "gather_bytes", "rebuild_bytes"):
        assert made[key] == sum(one[key] for one in made["tensors"])
    (norm,) = [one for one in made["tensors"] if one["names"][0].endswith("model.norm.weight")]
    assert norm["kinds"] == ["alias"]
    assert made["alias_bytes"] > 2 * made["plain_order_alias_bytes"]


def test_tensors_are_listed_when_asked_for(capsys):
    assert "tensors" not in json.loads(printed(capsys, "--json"))
    assert "qkv_proj" not in printed(capsys)
    assert "language_model.layers.*.self_attn.qkv_proj.weight" in printed(capsys, "--tensors")


def test_text(capsys):
    text = printed(capsys)
    assert "training native TP 8, rollout sglang TP 4, 8 GPUs" in text
    assert "alias in the plain order of ranks: 15.6 GiB" in text


def test_the_services_plan(capsys):
    made = json.loads(printed(capsys, "--json", "--services"))
    assert (made["train"]["layout"], made["rollout"]["layout"]) == ("native", "native")
    ranks = [(one["rollout_replica"], one["rollout_rank"]) for one in made["ranks"]]
    assert sorted(ranks) == [(replica, rank) for replica in range(2) for rank in range(4)]
    assert all(one["gather_bytes"] > one["rebuild_bytes"] > 0 for one in made["ranks"])
    assert not any("scratch_bytes" in one for one in (made, *made["ranks"]))
    text = printed(capsys, "--services")
    assert "rollout native TP 4" in text
    assert "scratch" not in text
    assert "| 8 | 4 |" in printed(capsys, "--services", "--pairs")


def test_element_size_follows_the_dtype(capsys):
    wide = json.loads(printed(capsys, "--json", "--dtype", "float32"))
    narrow = json.loads(printed(capsys, "--json"))
    assert wide["alias_bytes"] == 2 * narrow["alias_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt"], "model = 'gpt': neither a folder"),
        (["--train-tp", "3"], "train_tp = 3: qwen2.5-vl-32b has 40 heads"),
        (["--rollout-tp", "0"], "rollout_tp = 0: qwen2.5-vl-32b has 40 heads"),
        (["--train-layout", "sglang"], "train_layout = 'sglang': legal are native, megatron"),
        (["--rollout-layout", "megatron"], "rollout_layout = 'megatron': legal are native, sglang"),
        (["--gpus", "12"], "gpus = 12: with TP 8 in training and TP 4 in the rollout legal are mu"),
        (["--dtype", "int8"], "dtype = 'int8': legal are bfloat16, float32"),
        (["--services", "--gpus", "8"], "--services shows one node whose layouts are native"),
        (["--services", "--rollout-layout", "sglang"], "--services shows one node whose"),
    ],
)
def test_wrong_input(capsys, arguments, message):
    assert main([*EXAMPLE, *arguments]) == 2
    assert f"error: {message}" in capsys.readouterr().err
