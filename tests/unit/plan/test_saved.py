"""The tables of saved activations against what autograd really keeps, counted by storage."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from common.vlm.bound import bound_model
from common.vlm.model import SplitModel
from common.vlm.prefix import PrefixKV
from common.vlm.prompt import prepare_prompt
from common.vlm.shape import read_shape, shape_of
from common.vlm.tiny import FIRST_TEXT_ID, tiny_config, tiny_prompt
from rollplex.plan.saved import Kept, tower, tower_inputs

CONFIG = tiny_config(layers=4, intermediate_size=192)
SHAPE = shape_of(CONFIG.to_dict(), name="tiny")
PREFIX_TOKENS = 256
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WITHIN = 0.05


def kept(dtype, *, fused=False):
    return Kept(shape=SHAPE, fused=fused, itemsize=DTYPES[dtype].itemsize)


def saved_bytes(model, run):
    """Bytes of all storages that the graph of `run` holds, and of its results; no weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # held, so that no address is used twice
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = run()
    for tensor in results:
        keep(tensor)
    return sum(storage.nbytes() for storage in storages.values())


def split(dtype, *, train_vision=False, steps=None):
    bound = bound_model(CONFIG, dtype=DTYPES[dtype], train_vision=train_vision)
    return bound.model, SplitModel(bound.model, steps=steps)


def prefix_bytes(dtype, *, checkpointing=False, steps=None):
    model, parts = split(dtype, steps=steps)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(FIRST_TEXT_ID, 200, (PREFIX_TOKENS + 1,), generator=generator)
    prompt = prepare_prompt(CONFIG, token_ids=ids)
    no_vision = torch.zeros((0, CONFIG.text_config.hidden_size), dtype=parts.dtype)

    def run():
        prefix = parts.prefix_kv(prompt, no_vision, checkpointing=checkpointing)
        return [*prefix.keys, *prefix.values]

    return saved_bytes(model, run)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefix(dtype):
    planned = sum(kept(dtype).prefix().values()) * PREFIX_TOKENS
    assert prefix_bytes(dtype) == pytest.approx(planned, rel=WITHIN)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefix_with_layer_inputs_only(dtype):
    planned = sum(kept(dtype).prefix_inputs().values()) * PREFIX_TOKENS
    assert prefix_bytes(dtype, checkpointing=True) == pytest.approx(planned, rel=WITHIN)


@pytest.mark.parametrize("dtype", DTYPES)
def test_responses(dtype):
    model, parts = split(dtype)
    lengths = [64, 64]
    text = CONFIG.text_config
    width = text.hidden_size // text.num_attention_heads
    nothing = torch.zeros((text.num_key_value_heads, 0, width), dtype=parts.dtype)
    prefix = PrefixKV(keys=[nothing] * 4, values=[nothing] * 4)
    tokens = torch.full((sum(lengths),), FIRST_TEXT_ID)

    def run():
        logprobs = parts.response_logprobs(
            last_token=FIRST_TEXT_ID,
            start_position=0,
            prefix=prefix,
            tokens_T=tokens,
            lengths_G=lengths,
            temperature=1.0,
            suppressed=None,
        )
        return [logprobs]

    planned = sum(kept(dtype).response().values()) * sum(lengths)
    # a CPU's attention makes a mask of numbers from the boolean one in every layer
    masks = SHAPE.layers * sum(lengths) ** 2 * DTYPES[dtype].itemsize
    assert saved_bytes(model, run) - masks == pytest.approx(planned, rel=WITHIN)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tower(dtype, checkpointing):
    model, parts = split(dtype, train_vision=True)
    prompt = tiny_prompt(CONFIG, images=[(1, 32, 32)])
    prompt = replace(prompt, pixel_values=prompt.pixel_values.to(DTYPES[dtype]))
    table = tower_inputs if checkpointing else tower
    planned = sum(table(kept(dtype)).values()) * 32 * 32

    def run():
        return [parts.vision_embeddings(prompt, checkpointing=checkpointing)]

    assert saved_bytes(model, run) == pytest.approx(planned, rel=WITHIN)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1 from the start of the process",
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_fused_prefix(checkpointing):
    pytest.importorskip("triton", reason="Triton is not installed")
    from common.vlm.cuda.fused import FusedSteps
    from common.vlm.vision import PlainBlocks

    tables = kept("float32", fused=True)
    planned = sum((tables.prefix_inputs() if checkpointing else tables.prefix()).values())
    steps = FusedSteps(vision=PlainBlocks())
    measured = prefix_bytes("float32", checkpointing=checkpointing, steps=steps)
    assert measured == pytest.approx(planned * PREFIX_TOKENS, rel=WITHIN)


@pytest.mark.parametrize(("fused", "measured_mb"), [(True, 2.16), (False, 4.60)])
def test_the_figures_that_a_gpu_gave(fused, measured_mb):
    """Those of bench/results/passes_h200_2026-11-29.md."""
    tables = Kept(shape=read_shape("qwen2.5-vl-3b"), fused=fused, itemsize=2)
    assert sum(tables.prefix().values()) / 1e6 == pytest.approx(measured_mb, rel=0.01)
    assert tables.padding(6144) == 0


def test_ranks_share_what_is_kept():
    shape = read_shape("qwen2.5-vl-32b")

    def prefix(ranks, *, sequence_parallel):
        tables = Kept(
            shape=shape, fused=True, itemsize=2, ranks=ranks, sequence_parallel=sequence_parallel
        )
        return tables.prefix()

    whole, part = prefix(1, sequence_parallel=True), prefix(8, sequence_parallel=True)
    own = ("cosines and sines: 2 D s", "token ids")
    assert {name: part[name] for name in own} == {name: whole[name] for name in own}
    assert all(part[name] == whole[name] / 8 for name in whole if name not in own)
    replicated = prefix(8, sequence_parallel=False)
    assert replicated["layer input: h s"] == whole["layer input: h s"]


def test_a_long_prefix_is_extended():
    tables = Kept(shape=read_shape("qwen2.5-vl-3b"), fused=True, itemsize=2)
    per_token = 2 * (16 + 2 * 2) * 128
    result = 2 * 16 * 128
    assert tables.padding(4095) == 35 * (4096 * per_token + result)
    assert tables.padding(4096) == tables.padding(2047) == 0
