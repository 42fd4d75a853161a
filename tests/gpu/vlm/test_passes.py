"""The fused split pass on a CUDA device against plain modules and against float32."""

from __future__ import annotations

import pytest
import torch

from common.vlm.attention import SdpaAttention
from common.vlm.bound import bound_model
from common.vlm.model import SplitModel
from common.vlm.prefix import PrefixKV, packed_shape, prefix_backward
from common.vlm.tiny import tiny_config, tiny_prompt
from common.weights.binding import views

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [37, 0, 130, 64]


def config(**changes):
    return tiny_config(
        hidden_size=256, heads=4, kv_heads=2, layers=3, intermediate_size=352, **changes
    )


def bound(dtype, **changes):
    return bound_model(
        config(**changes),
        dtype=dtype,
        train_vision=True,
        gradient_dtype=torch.float32,
        device="cuda",
        std=0.05,
    )


def run(made, *, steps=None, attention=None):
    """Log-probabilities and all gradients of one group with one image."""
    model = SplitModel(made.model, steps=steps, attention=attention, logit_chunk_tokens=64)
    prompt = tiny_prompt(made.model.config, images=[(1, 12, 8)], text_tokens=150).to("cuda")
    made.gradients.zero_()
    prefix = model.prefix_kv(prompt, model.vision_embeddings(prompt))
    packed = torch.empty(
        packed_shape(made.model.config, prefix.tokens), device="cuda", dtype=made.weights.dtype
    )
    prefix.pack(packed)
    gradient = torch.zeros_like(packed, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    tokens_T = torch.randint(8, 200, (sum(LENGTHS),), generator=generator).cuda()
    logprobs = model.response_logprobs(
        last_token=int(prompt.token_ids[-1]),
        start_position=prompt.start_position,
        prefix=PrefixKV.leaves(packed, gradient),
        tokens_T=tokens_T,
        lengths_G=LENGTHS,
        temperature=0.7,
        suppressed=torch.tensor([3, 4], device="cuda"),
    )
    (logprobs * torch.linspace(-1, 1, len(logprobs), device="cuda")).sum().backward()
    prefix_backward(prefix, gradient)
    return logprobs.detach(), made.gradients.clone()


def distance(actual, expected):
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("tied", [False, True])
def test_float32_gradients_equal_plain_modules(tied):
    from common.vlm.cuda.fused import FusedSteps
    from common.vlm.vision import PlainBlocks

    made = bound(torch.float32, tie_word_embeddings=tied)
    plain_logprobs, plain = run(made)
    logprobs, gradients = run(made, steps=FusedSteps(vision=PlainBlocks()))
    torch.testing.assert_close(logprobs, plain_logprobs, rtol=1e-4, atol=1e-4)
    fused_parts = views(gradients, made.layout)
    for name, expected in views(plain, made.layout).items():
        if float(expected.norm()) > 0:
            assert distance(fused_parts[name], expected) < 1e-4, name


@pytest.mark.parametrize("library", ["flash", "cudnn"])
def test_bfloat16_is_as_near_to_float32_as_plain_modules_are(library):
    from common.vlm.cuda.attention import FusedAttention
    from common.vlm.cuda.fused import FusedBlocks, FusedSteps

    exact_logprobs, exact = run(bound(torch.float32))
    made = bound(torch.bfloat16)
    plain_logprobs, plain = run(made, attention=SdpaAttention())
    whole = "cudnn" if library == "cudnn" else None
    logprobs, gradients = run(
        made,
        steps=FusedSteps(vision=FusedBlocks(whole=whole)),
        attention=FusedAttention(prefix=library, response=library),
    )
    assert distance(logprobs, exact_logprobs) < 1.5 * distance(plain_logprobs, exact_logprobs)
    assert distance(gradients, exact) < 1.5 * distance(plain, exact)


def test_responses_do_not_see_each_other():
    from common.vlm.cuda.attention import FusedAttention

    backend = FusedAttention()
    lengths = [70, 5, 128]
    plan = backend.plan(50, lengths, torch.device("cuda"))
    generator = torch.Generator(device="cuda").manual_seed(0)

    def states(heads, tokens):
        shape = (tokens, heads, 64)
        made = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        return made.transpose(0, 1)

    query, key, value = states(8, 203), states(2, 203), states(2, 203)
    prefix = (states(2, 50), states(2, 50))
    before = backend.responses(query, prefix, (key, value), plan)
    key[:, 70:75] += 1
    value[:, 70:75] += 1
    after = backend.responses(query, prefix, (key, value), plan)
    assert torch.equal(before[:, :70], after[:, :70])
    assert torch.equal(before[:, 75:], after[:, 75:])
    assert not torch.equal(before[:, 70:75], after[:, 70:75])


@pytest.mark.parametrize("prefix_tokens", [0, 50, 333])
def test_merged_attention_and_its_gradients(prefix_tokens):
    from common.vlm.cuda.attention import FusedAttention

    lengths = [70, 0, 5, 128]
    shapes = [(8, 203), (2, prefix_tokens), (2, prefix_tokens), (2, 203), (2, 203)]
    generator = torch.Generator(device="cuda").manual_seed(0)
    halves = [
        torch.randn((t, h, 64), device="cuda", generator=generator).bfloat16().transpose(0, 1)
        for h, t in shapes
    ]
    results = []
    for backend, dtype in ((SdpaAttention(), torch.float32), (FusedAttention(), torch.bfloat16)):
        leaves = [half.detach().to(dtype).requires_grad_() for half in halves]
        plan = backend.plan(prefix_tokens, lengths, torch.device("cuda"))
        out = backend.responses(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]), plan)
        weights = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=dtype).view(out.shape)
        wanted = [leaf for leaf in leaves if leaf.numel()]
        results.append([out, *torch.autograd.grad(out, wanted, weights)])
    for expected, actual in zip(*results, strict=True):
        assert distance(actual, expected) < 1e-2


@pytest.mark.parametrize("tokens", [2047, 2048, 2300])
def test_long_prefixes_attend_alike_with_and_without_extension(tokens):
    from common.vlm.cuda.attention import FusedAttention

    generator = torch.Generator(device="cuda").manual_seed(0)
    halves = [
        torch.randn((tokens, heads, 64), device="cuda", generator=generator)
        .bfloat16()
        .transpose(0, 1)
        for heads in (8, 2, 2)
    ]
    results = []
    for backend, dtype in ((SdpaAttention(), torch.float32), (FusedAttention(), torch.bfloat16)):
        leaves = [half.detach().to(dtype).requires_grad_() for half in halves]
        out = backend.prefix(*leaves)
        weights = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=dtype).view(out.shape)
        results.append([out, *torch.autograd.grad(out, leaves, weights)])
    for expected, actual in zip(*results, strict=True):
        assert actual.shape == expected.shape
        assert distance(actual, expected) < 1e-2


def test_a_deep_model_and_a_long_prefix_stay_as_near_to_float32_as_plain_modules():
    from common.vlm.kernels import split_model

    deep = tiny_config(
        hidden_size=512, heads=8, kv_heads=2, layers=16, intermediate_size=1376, vocab_size=2000
    )
    made = {
        dtype: bound_model(
            deep,
            dtype=dtype,
            train_vision=False,
            gradient_dtype=torch.float32,
            device="cuda",
            std=0.03,
        )
        for dtype in (torch.float32, torch.bfloat16)
    }
    half = made[torch.bfloat16]
    made[torch.float32].weights.copy_(half.weights)
    exact_logprobs, exact = run_text(SplitModel(made[torch.float32].model), made[torch.float32])
    plain_logprobs, plain = run_text(split_model(half.model, "plain"), half)
    logprobs, gradients = run_text(split_model(half.model, "auto"), half)
    assert distance(logprobs, exact_logprobs) < 1.3 * distance(plain_logprobs, exact_logprobs)
    assert distance(gradients, exact) < 1.3 * distance(plain, exact)


def run_text(model, made):
    """Log-probabilities and all gradients of one group behind a prefix of 2,300 tokens."""
    prompt = tiny_prompt(made.model.config, text_tokens=2301).to("cuda")
    made.gradients.zero_()
    prefix = model.prefix_kv(prompt, model.vision_embeddings(prompt))
    packed = torch.empty(
        packed_shape(made.model.config, prefix.tokens), device="cuda", dtype=made.weights.dtype
    )
    prefix.pack(packed)
    gradient = torch.zeros_like(packed, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    tokens_T = torch.randint(8, 1900, (sum(LENGTHS),), generator=generator).cuda()
    logprobs = model.response_logprobs(
        last_token=int(prompt.token_ids[-1]),
        start_position=prompt.start_position,
        prefix=PrefixKV.leaves(packed, gradient),
        tokens_T=tokens_T,
        lengths_G=LENGTHS,
        temperature=1.0,
        suppressed=None,
    )
    (logprobs * torch.linspace(-1, 1, len(logprobs), device="cuda")).sum().backward()
    prefix_backward(prefix, gradient)
    return logprobs.detach(), made.gradients.clone()
