from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from common.vlm.kernels import fused_kernels

PROBE = """
import sys, torch
from common.vlm.bound import bound_model
from common.vlm.kernels import split_model
from common.vlm.tiny import tiny_config
from services.rollout.engines.native import NativeEngine
model = bound_model(tiny_config(), dtype=torch.bfloat16, train_vision=False).model
assert not split_model(model, "auto").fused
NativeEngine(split_model(model, "auto"), max_slots=4)
loaded = [name for name in sys.modules if name.startswith(("triton", "common.vlm.cuda"))]
sys.exit(f"loaded: {loaded}" if loaded else 0)
"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_a_cpu_has_plain_kernels(kernels, dtype):
    assert not fused_kernels(kernels, device=torch.device("cpu"), dtype=dtype)


@pytest.mark.parametrize(
    ("kernels", "dtype", "capability", "fused"),
    [
        ("auto", torch.bfloat16, (9, 0), True),
        ("auto", torch.bfloat16, (8, 0), True),
        ("auto", torch.bfloat16, (7, 5), False),
        ("auto", torch.float32, (9, 0), False),
        ("auto", torch.float64, (9, 0), False),
        ("plain", torch.bfloat16, (9, 0), False),
    ],
)
def test_a_gpu_has_fused_kernels_for_bfloat16(monkeypatch, kernels, dtype, capability, fused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fused_kernels(kernels, device=torch.device("cuda", 0), dtype=dtype) is fused


def test_plain_kernels_need_no_triton():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
