"""Streams on a share of the SMs."""

from __future__ import annotations

import pytest
import torch

from common.errors import InvalidArgument
from common.gpu.green_streams import GreenStreams

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def streams() -> GreenStreams:
    """Green contexts stay for the process's life: one set for all tests."""
    total = torch.cuda.get_device_properties(0).multi_processor_count
    return GreenStreams(0, [total // 4, total // 2])


def test_shares_are_at_least_what_was_asked_for(streams: GreenStreams) -> None:
    assert streams.shares[-1] == streams.total_sms
    assert len(streams.shares) == 3
    assert streams.shares[0] >= streams.total_sms // 4
    assert streams.stream(1) is streams.stream(streams.shares[0])
    assert streams.stream(streams.total_sms + 5) is streams.stream(streams.total_sms)


def test_forward_and_backward_on_every_share(streams: GreenStreams) -> None:
    gradients = []
    for share in streams.shares:
        torch.manual_seed(0)
        torch.cuda.synchronize()
        weights = torch.randn(256, 256, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams.stream(share)):
            (weights @ weights).square().sum().backward()
            streams.stream(share).synchronize()
        gradients.append(weights.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def test_a_share_beyond_the_device(streams: GreenStreams) -> None:
    with pytest.raises(InvalidArgument, match=f"legal is 1 to {streams.total_sms}"):
        GreenStreams(0, [streams.total_sms + 1])
