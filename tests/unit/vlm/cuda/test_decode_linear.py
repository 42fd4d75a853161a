"""Products cut in different ways, with Triton's interpreter in place of a GPU."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1 from the start of the process",
)


@pytest.mark.parametrize("inner", [256, 344, 1000])
def test_parts_are_the_same_inputs_whatever_the_tiles(inner):
    from common.vlm.cuda.decode_linear import Tiles, linear

    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(n, inner, generator=generator) for n in (5, 72))
    parts = []
    for columns, step in ((64, 64), (32, 128)):
        tiles = Tiles(columns=columns, inner=step, splits=3, stages=2)
        out = torch.empty(3, 5, 72)
        linear(x, weight, out, tiles)
        parts.append(out)
    torch.testing.assert_close(parts[0], parts[1], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(parts[0].sum(0), x @ weight.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [3, 70])
def test_gated_product(rows):
    from common.vlm.cuda.decode_linear import Tiles, gated_linear

    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, 128, generator=generator) for n in (rows, 2 * 40))
    out = torch.empty(1, rows, 40)
    gated_linear(x, weight, out, Tiles(columns=32, inner=64))
    gate, up = (x @ weight.t()).chunk(2, dim=1)
    torch.testing.assert_close(out[0], torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)
