from __future__ import annotations

import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionAttention,
)

from bench import trl_vision

MERGED = 4
"""Patches of one merged patch."""


@pytest.fixture
def tower() -> torch.nn.Module:
    """Two blocks: windows of 2 by 2 merged patches, then whole pictures."""
    config = Qwen2_5_VLVisionConfig(
        depth=2,
        hidden_size=32,
        intermediate_size=32,
        num_heads=2,
        out_hidden_size=32,
        fullatt_block_indexes=[1],
        window_size=56,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    return Qwen2_5_VisionTransformerPretrainedModel._from_config(
        config, attn_implementation="sdpa"
    ).double()


def _run(tower, grids: list[tuple[int, int]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    grid_thw = torch.tensor([(1, 2 * down, 2 * across) for down, across in grids])
    generator = torch.Generator().manual_seed(1)
    patches = int(grid_thw.prod(1).sum())
    pixels = torch.randn(patches, 3 * 2 * 14 * 14, generator=generator, dtype=torch.float64)
    tower.zero_grad(set_to_none=True)
    out = tower(pixels, grid_thw=grid_thw).pooler_output
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    (out * weights).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in tower.named_parameters()}


@pytest.mark.parametrize(
    "grids",
    [[(4, 6)], [(5, 7)], [(3, 5), (4, 4), (5, 3), (1, 1)]],
    ids=["equal windows", "windows cut off at the edges", "pictures of many sizes"],
)
@pytest.mark.parametrize("at_once", [1, 8 * MERGED, 1 << 18])
def test_the_tower_gives_the_librarys_values_and_gradients(
    tower, grids, at_once: int, monkeypatch
) -> None:
    monkeypatch.setattr(trl_vision, "_CALL_PATCHES", at_once)
    wanted, wanted_gradients = _run(tower, grids)
    with trl_vision.batched_vision_attention():
        found, found_gradients = _run(tower, grids)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found_gradients, wanted_gradients)


def test_equal_windows_take_one_call_and_the_librarys_way_comes_back(tower, monkeypatch) -> None:
    calls: list[torch.Size] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def count(query, *args, **kwargs):
        calls.append(query.shape)
        return original(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", count)
    forward = Qwen2_5_VLVisionAttention.forward
    with trl_vision.batched_vision_attention():
        _run(tower, [(4, 6), (4, 6)])
    # twelve windows of 2 by 2 merged patches, then two pictures
    assert [tuple(shape) for shape in calls] == [(12, 2, 16, 16), (2, 2, 96, 16)]
    assert Qwen2_5_VLVisionAttention.forward is forward
