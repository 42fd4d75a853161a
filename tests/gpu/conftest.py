"""For every test on a GPU."""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def cuda_is_open() -> None:
    """What CUDA opens in a process it keeps: have it before a test looks at what is open."""
    if not torch.cuda.is_available():
        pytest.fail("these tests need a CUDA device that torch can use")
    torch.ones(8, 8, device="cuda").matmul(torch.ones(8, 8, device="cuda")).sum().item()


@pytest.fixture(autouse=True)
def nothing_is_cached(cuda_is_open: None) -> None:
    """Start with no device memory in torch's cache, so that what is free means something."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
