"""Which runs a measurement makes, and what each is compared with."""

from __future__ import annotations

import pytest

from bench.step_engines import Asked, asked
from bench.step_inputs import recipe
from bench.step_summary import compare
from bench.step_workloads import WORKLOADS, workload
from common.config.loading import load_config
from common.errors import InvalidArgument
from common.governor.table import H200
from common.rl.lengths import LengthsConfig
from common.vlm.initialise import ModelSpec


def test_labels_name_the_engine_and_count():
    texts = ["serial", "serial@sglang", "rollplex@sglang-copy", "serial", "serial@sglang"]
    assert asked(texts) == {
        "serial": Asked(schedule="serial"),
        "serial@sglang": Asked(schedule="serial", engine="sglang"),
        "rollplex@sglang-copy": Asked(schedule="rollplex", engine="sglang-copy"),
        "serial-2": Asked(schedule="serial"),
        "serial@sglang-2": Asked(schedule="serial", engine="sglang"),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [("parallel", "'parallel'; legal are serial"), ("serial@vllm", "sglang-copy")],
)
def test_what_there_is_not_is_refused_with_what_there_is(text, words):
    with pytest.raises(InvalidArgument, match=words):
        asked([text])


@pytest.mark.parametrize(("engine", "weights"), [("sglang", "alias"), ("sglang-copy", "copy")])
def test_a_recipe_is_one_of_sglang_s(tmp_path, engine, weights):
    one = Asked(schedule="rollplex", engine=engine)
    made = recipe(
        WORKLOADS["A"],
        one.schedule,
        rollout=one.rollout(device="cuda", table={"release_memory": False}),
        model=tmp_path,
        rows=tmp_path,
        steps=1,
        checkpointing=False,
        prefix_graphs="auto",
        spill_optimizer="auto",
        ahead=True,
        data_workers=1,
    )
    assert made.rollout.engine == "sglang"
    assert made.rollout.sglang.weights == weights
    assert not made.rollout.sglang.release_memory
    # every sequence of the workload decodes in a graph
    assert max(made.rollout.sglang.arguments["cuda_graph_bs_decode"]) == made.rollout.max_slots


def test_an_engine_s_runs_are_compared_with_its_own_serial_run():
    figures = {
        label: {"schedule": one.schedule, "engine": one.engine, "step_s": step_s, "window_s": 1.0}
        for (label, one), step_s in zip(
            asked(["serial", "rollplex@sglang", "serial@sglang", "rollplex@sglang-copy"]).items(),
            [4.0, 5.0, 10.0, 7.0],
            strict=True,
        )
    }
    work = WORKLOADS["B"]
    compare(figures, work=work, seed=1, step_numbers=range(1), tables=dict.fromkeys(figures, H200))
    gains = {label: found.get("gain_over_serial") for label, found in figures.items()}
    assert gains == {
        "serial": 1.0,
        "rollplex@sglang": 2.0,
        "serial@sglang": 1.0,
        "rollplex@sglang-copy": None,
    }


def test_the_thin_scale_has_the_widths_of_the_full_one():
    full, thin = (
        load_config(ModelSpec, workload("B", scale=scale).model) for scale in ("full", "thin")
    )
    lengths = workload("B", scale="thin").lengths
    assert lengths == LengthsConfig(kind="fixed", max_tokens=128)
    assert thin.text.layers < full.text.layers
    assert thin.text.model_copy(update={"layers": full.text.layers}) == full.text
