"""The fused steps against the library's modules, with Triton's interpreter in place of a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from common.vlm.bound import bound_model
from common.vlm.model import SplitModel
from common.vlm.prefix import PrefixKV, prefix_backward
from common.vlm.tiny import tiny_config, tiny_prompt

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1 from the start of the process",
)


@pytest.fixture
def fused_steps():
    from common.vlm.cuda.fused import FusedSteps
    from tests.unit.vlm.cuda.segments import SegmentBlocks

    return FusedSteps(vision=SegmentBlocks())


def run(bound, steps, *, train_vision, checkpointing=False):
    """Log-probabilities and all gradients of one group through the split pass."""
    model = SplitModel(bound.model, steps=steps, logit_chunk_tokens=5)
    prompt = tiny_prompt(bound.model.config, images=[(1, 8, 4)], text_tokens=4)
    bound.gradients.zero_()
    with torch.set_grad_enabled(train_vision):
        vision = model.vision_embeddings(prompt)
    prefix = model.prefix_kv(prompt, vision, checkpointing=checkpointing)
    layers, (heads, tokens, width) = len(prefix.keys), prefix.keys[0].shape
    packed = torch.empty(layers, 2, heads, tokens, width)
    prefix.pack(packed)
    gradient = torch.zeros_like(packed)
    lengths = [3, 0, 5]
    generator = torch.Generator().manual_seed(1)
    tokens_T = torch.randint(8, 200, (8,), generator=generator)
    logprobs = model.response_logprobs(
        last_token=int(prompt.token_ids[-1]),
        start_position=prompt.start_position,
        prefix=PrefixKV.leaves(packed, gradient),
        tokens_T=tokens_T,
        lengths_G=lengths,
        temperature=0.7,
        suppressed=torch.tensor([3, 4]),
        checkpointing=checkpointing,
    )
    (logprobs * torch.linspace(-1, 1, 8)).sum().backward()
    prefix_backward(prefix, gradient)
    return logprobs.detach(), bound.gradients.clone()


@pytest.mark.parametrize("train_vision", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_equals_plain_modules(fused_steps, train_vision, tied):
    config = tiny_config(tie_word_embeddings=tied)
    bound = bound_model(config, dtype=torch.float32, train_vision=train_vision)
    plain_logprobs, plain = run(bound, None, train_vision=train_vision)
    logprobs, gradients = run(bound, fused_steps, train_vision=train_vision)
    torch.testing.assert_close(logprobs, plain_logprobs, rtol=1e-5, atol=1e-5)
    from common.weights.binding import views

    for name, expected in views(plain, bound.layout).items():
        actual = views(gradients, bound.layout)[name]
        scale = expected.abs().max()
        assert (actual - expected).abs().max() <= 1e-4 * scale + 1e-7, name


def test_odd_inner_widths_are_padded(fused_steps, monkeypatch):
    from common.vlm.cuda import blocks

    bound = bound_model(tiny_config(), dtype=torch.float32, train_vision=True)
    _, expected = run(bound, fused_steps, train_vision=True)
    monkeypatch.setattr(blocks, "_ROW_ALIGNMENT", 48)
    _, gradients = run(bound, fused_steps, train_vision=True)
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


def test_checkpointing_changes_nothing(fused_steps):
    bound = bound_model(tiny_config(), dtype=torch.float32, train_vision=True)
    _, expected = run(bound, fused_steps, train_vision=True)
    _, gradients = run(bound, fused_steps, train_vision=True, checkpointing=True)
    torch.testing.assert_close(gradients, expected, rtol=1e-6, atol=1e-7)
