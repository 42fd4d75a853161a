"""Records, plans, sizes and files: the plain values around the run machine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from common.config.loading import check
from common.config.recipe import Recipe
from common.errors import InvalidArgument, ResourceExhausted
from common.ids import Epoch, Service, StepIndex, WeightsVersion
from common.step.partners import Partners
from common.step.place import Place
from common.step.plan import StepMode
from common.vlm.tiny import tiny_config
from protos.rollplex.v1 import broker_pb2
from services.controller.feed import RunFeed
from services.controller.files import append_step, prepare_run_dir, read_steps
from services.controller.record import RunRecord, RunState, StepRecord, StopRequest
from services.controller.room import check_room, count_elements, needed_bytes
from services.controller.settings import read_recipe, run_settings
from tests.unit.controller.kit import RECORD

STEP = StepRecord(
    step=StepIndex(3),
    epoch=Epoch(9),
    mode=StepMode.TRAIN,
    weights_version=WeightsVersion(4),
    wall_s=1.5,
    metrics={"loss": 0.25},
)


def _recipe(**tables) -> Recipe:
    tree = {
        "name": "r",
        "seed": 5,
        "model": {"path": "/m"},
        "data": {"train": "a.b:c"},
        "rollout": {"max_new_tokens": 1},
        "reward": {"functions": [{"function": "a.b:c"}]},
        "algorithm": {},
        "training": {"steps": 10, "prompts_per_step": 4},
    }
    for name, table in tables.items():
        tree[name] = tree[name] | table
    return check(Recipe, tree, source="test")


def test_records_survive_json():
    record = replace(
        RECORD,
        state=RunState.PAUSED,
        stop_requested=StopRequest.AFTER_STEP,
        latest={"loss": 0.5},
        eval_reward_before=0.25,
    )
    assert RunRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    assert StepRecord.from_json(json.loads(json.dumps(STEP.to_json()))) == STEP


@pytest.mark.parametrize(
    ("eval_prompts", "eval_rows", "expected"), [(0, 7, 7), (3, 7, 3), (30, 7, 7), (0, 0, 0)]
)
def test_an_evaluation_uses_no_more_rows_than_there_are(eval_prompts, eval_rows, expected):
    recipe = _recipe(data={"eval": "a.b:d"}, training={"eval_prompts": eval_prompts})
    assert (
        run_settings(recipe, train_rows=9, eval_rows=eval_rows, place=Place()).eval_rows == expected
    )


def test_the_samples_of_a_step_depend_on_seed_and_step_only():
    settings = run_settings(_recipe(), train_rows=8, eval_rows=0, place=Place())
    again = run_settings(_recipe(), train_rows=8, eval_rows=0, place=Place())
    other = run_settings(
        _recipe().model_copy(update={"seed": 6}), train_rows=8, eval_rows=0, place=Place()
    )
    steps = [settings.order(StepIndex(step)) for step in range(4)]
    assert steps == [again.order(StepIndex(step)) for step in range(4)]
    assert steps != [other.order(StepIndex(step)) for step in range(4)]
    # Two steps of four make one pass over eight rows.
    assert sorted([*steps[0], *steps[1]]) == list(range(8))


def test_replayed_responses_come_from_the_folder_in_which_the_rollout_keeps_them():
    settings = run_settings(
        _recipe(training={"replay_from": "/runs/old"}), train_rows=8, eval_rows=0, place=Place()
    )
    assert settings.replay_dir == "/runs/old/responses"


def test_an_evaluation_has_time_in_proportion_to_its_groups():
    recipe = _recipe(data={"eval": "a.b:d"}, training={"step_deadline_s": 10})
    settings = run_settings(recipe, train_rows=8, eval_rows=20, place=Place())
    plan = settings.eval_plan("r", StepIndex(0), Epoch(1))
    assert settings.deadline_s(plan) == 50
    assert settings.deadline_s(settings.train_plan("r", StepIndex(0), Epoch(1))) == 10


def test_groups_are_bound_to_the_replicas_in_turn():
    recipe = _recipe(data={"eval": "a.b:d"}, training={"prompts_per_step": 5, "steps": 4})
    settings = run_settings(recipe, train_rows=9, eval_rows=3, place=Place(degree=2, replicas=2))
    trained = settings.train_plan("r", StepIndex(0), Epoch(1))
    evaluated = settings.eval_plan("r", StepIndex(0), Epoch(1))
    assert [group.replica for group in trained.groups] == [0, 1, 0, 1, 0]
    assert [group.replica for group in evaluated.groups] == [0, 1, 0]
    assert evaluated.ahead == trained.groups


def _ahead(plan):
    return [(group.split, group.sample) for group in plan.ahead]


def _samples(plan):
    return [(group.split, group.sample) for group in plan.groups]


def test_a_plan_names_the_groups_of_what_comes_next():
    recipe = _recipe(data={"eval": "a.b:d"}, training={"steps": 4, "eval_every_steps": 2})
    settings = run_settings(recipe, train_rows=9, eval_rows=3, place=Place())
    trained = [settings.train_plan("r", StepIndex(step), Epoch(1)) for step in range(4)]
    evaluated = [settings.eval_plan("r", StepIndex(step), Epoch(1)) for step in (0, 2, 4)]
    assert _ahead(evaluated[0]) == _samples(trained[0])
    assert _ahead(trained[0]) == _samples(trained[1])
    assert _ahead(trained[1]) == _samples(evaluated[1])
    assert _ahead(evaluated[1]) == _samples(trained[2])
    assert _ahead(trained[3]) == _samples(evaluated[2])
    assert _ahead(evaluated[2]) == []
    again = settings.train_plan("r", StepIndex(1), Epoch(7))
    assert replace(again, epoch=Epoch(1)) == trained[1]


def test_a_plan_names_nothing_ahead_behind_the_last_step_or_where_it_is_off():
    plain = run_settings(_recipe(), train_rows=9, eval_rows=0, place=Place())
    off = run_settings(_recipe(training={"ahead": False}), train_rows=9, eval_rows=0, place=Place())
    assert _ahead(plain.train_plan("r", StepIndex(8), Epoch(1)))
    assert _ahead(plain.train_plan("r", StepIndex(9), Epoch(1))) == []
    assert _ahead(off.train_plan("r", StepIndex(8), Epoch(1))) == []


@pytest.mark.parametrize("text", ["no json", "[1]", "{}"])
def test_a_request_without_a_recipe_is_refused(text):
    with pytest.raises(InvalidArgument):
        read_recipe(text)


def _safetensors(path, shapes) -> None:
    header = json.dumps({name: {"shape": shape} for name, shape in shapes.items()}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.fixture
def model(tmp_path):
    _safetensors(tmp_path / "a.safetensors", {"model.layers.0.w": [10, 100], "__metadata__": [1]})
    _safetensors(tmp_path / "b.safetensors", {"visual.blocks.0.w": [5, 100], "lm_head.b": []})
    return tmp_path


def test_parameters_are_counted_from_the_headers(model):
    elements = count_elements(model, key="model.path")
    assert (elements.language, elements.vision) == (1001, 500)


@pytest.mark.parametrize(
    ("table", "kl", "expected"),
    [
        ({}, 0.0, {"weights": 6004, "optimizer": 8008, "gradients": 4004}),
        ({"train_vision": True}, 0.0, {"weights": 6004, "optimizer": 12008, "gradients": 6004}),
        ({"dtype": "bfloat16"}, 0.0, {"weights": 3002, "optimizer": 12012, "gradients": 4004}),
        ({"dtype": "float64"}, 0.0, {"weights": 12008, "optimizer": 16016, "gradients": 8008}),
        ({}, 0.1, {"weights": 6004, "optimizer": 8008, "gradients": 4004, "reference": 6004}),
    ],
)
def test_the_storages_of_a_run_are_sized(model, table, kl, expected):
    recipe = _recipe(model={"path": str(model)} | table, algorithm={"kl_coefficient": kl})
    needed = needed_bytes(recipe, device="cpu", place=Place())
    reference = expected.pop("reference", None)
    assert needed.pop("reference.weights", None) == reference
    assert needed == {f"policy.{name}": size for name, size in expected.items()}


@pytest.mark.parametrize(
    ("training", "device", "degree", "elements"),
    [
        # 1001 elements of 8 bytes in parts of 1 KiB: seven of 128, and a last one.
        ({}, "cuda", 1, 3 * 128),
        ({}, "cpu", 1, 1001),
        ({}, "cpu", 2, 1001),
        ({"spill_optimizer": True}, "cpu", 1, 3 * 128),
        # Each of two ranks has 500 of them.
        ({"spill_optimizer": True}, "cpu", 2, 2 * 3 * 128),
        # On GPUs each has an arena of its own.
        ({"spill_optimizer": True}, "cuda", 2, 3 * 128),
        ({"spill_optimizer": False}, "cuda", 1, 1001),
        ({"optimizer_part_mib": 3072.0}, "cuda", 1, 1001),
    ],
)
def test_of_optimizer_state_that_is_spilled_the_parts_in_flight_need_room(
    model, training, device, degree, elements
):
    parts = {"optimizer_part_mib": 1 / 1024} | training
    recipe = _recipe(model={"path": str(model)}, training=parts)
    needed = needed_bytes(recipe, device=device, place=Place(degree=degree))
    assert needed["policy.optimizer"] == 8 * elements


@pytest.mark.parametrize(
    ("rollout", "elements"),
    # Two ranks have the joined projections of two blocks once more, in every replica.
    [
        (None, None),
        ((1, 1), None),
        ((1, 2), None),
        ((2, 1), 2 * 3 * 64 * (64 + 1)),
        ((2, 3), 3 * 2 * 3 * 64 * (64 + 1)),
    ],
    ids=str,
)
def test_what_a_rollout_of_another_degree_rebuilds_needs_room(model, rollout, elements):
    tower = {"vision_hidden_size": 64, "vision_heads": 2}
    (model / "config.json").write_text(json.dumps(tiny_config(**tower).to_dict()))
    recipe = _recipe(model={"path": str(model)})
    partners = None
    if rollout is not None:
        partners = Partners({Service.ROLLOUT: rollout[0]}, {Service.ROLLOUT: rollout[1]})
    needed = needed_bytes(recipe, device="cpu", place=Place(), partners=partners)
    bytes_ = None if elements is None else 4 * elements
    assert needed.get("rollout.weights") == bytes_


def test_replicas_share_the_optimizers_state_alone(model):
    recipe = _recipe(
        model={"path": str(model)},
        algorithm={"kl_coefficient": 0.1},
        training={"schedule": "disaggregated"},
    )
    one = needed_bytes(recipe, device="cpu", place=Place())
    three = needed_bytes(recipe, device="cpu", place=Place(replicas=3))
    assert three.pop("policy.optimizer") == one.pop("policy.optimizer")
    assert three == {name: 3 * size for name, size in one.items()}
    assert {"reference.weights", "rollout.weights"} <= one.keys()


def test_a_gpu_has_one_rank_of_one_replica(model):
    recipe = _recipe(model={"path": str(model)}, training={"spill_optimizer": False})
    one = needed_bytes(recipe, device="cuda", place=Place())
    four = needed_bytes(recipe, device="cuda", place=Place(degree=2, replicas=2))
    assert four.pop("policy.optimizer") == one.pop("policy.optimizer") // 4
    assert four == {name: size // 2 for name, size in one.items()}


def test_a_run_that_does_not_fit_is_refused_with_the_ledger(model):
    recipe = _recipe(model={"path": str(model)})
    row = broker_pb2.LedgerEntry(
        name="policy.weights", run_id="other", bytes=2**20, holders=["learner/0"], until="its end"
    )
    node = {"device": "cpu", "place": Place()}
    check_room(recipe, broker_pb2.Ledger(capacity_bytes=6004 + 8008 + 4004), **node)
    with pytest.raises(ResourceExhausted, match=r"arena_gib") as refused:
        check_room(recipe, broker_pb2.Ledger(capacity_bytes=18_000, entries=[row]), **node)
    assert "1.0 MiB  policy.weights  of run other, held by learner/0, until its end" in str(
        refused.value
    )


def test_a_file_that_is_no_safetensors_is_named(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidArgument, match=r"model\.path: .*x\.safetensors is not"):
        count_elements(tmp_path, key="model.path")


def test_a_torn_line_does_not_spoil_the_next(tmp_path):
    append_step(tmp_path, STEP, ())
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 4, "ep')
    append_step(tmp_path, replace(STEP, step=StepIndex(4)), ())
    assert [step.step for step in read_steps(tmp_path)] == [3, 4]


def test_a_folder_that_holds_another_run_is_refused(tmp_path):
    prepare_run_dir(tmp_path / "a" / "b", "{}")
    assert (tmp_path / "a" / "b" / "recipe.json").read_text() == "{}\n"
    with pytest.raises(InvalidArgument, match="holds another run"):
        prepare_run_dir(tmp_path / "a" / "b", "{}")
    with pytest.raises(InvalidArgument, match="cannot be used"):
        prepare_run_dir(tmp_path / "a" / "b" / "recipe.json" / "c", "{}")
    append_step(tmp_path, STEP, ())
    with pytest.raises(InvalidArgument, match="holds another run"):
        prepare_run_dir(tmp_path, "{}")


async def test_a_slow_watcher_sees_the_latest_state_and_the_end():
    feed = RunFeed(RECORD)
    watch = feed.watch()
    assert (await anext(watch)).run.steps_done == 0
    for done in (1, 2):
        step = replace(STEP, weights_version=WeightsVersion(done))
        feed.saved(replace(RECORD, state=RunState.RUNNING, steps_done=done), step)
    feed.note("hello")
    update = await anext(watch)
    assert (update.run.steps_done, update.step.weights_version, update.note) == (2, 2, "hello")
    feed.saved(replace(RECORD, state=RunState.SUCCEEDED, steps_done=2))
    update = await anext(watch)
    assert not update.HasField("step")
    assert update.note == ""
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


async def test_watching_an_ended_run_gives_its_state_once():
    feed = RunFeed(replace(RECORD, state=RunState.FAILED, reason="why"))
    updates = [update async for update in feed.watch()]
    assert [update.run.reason for update in updates] == ["why"]
