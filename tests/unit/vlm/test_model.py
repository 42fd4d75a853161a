from __future__ import annotations

import dataclasses

import pytest
import torch

from common.vlm.bound import bound_model
from common.vlm.errors import PromptInvalid, ResponseInvalid
from common.vlm.loading import suppressed_token_ids
from common.vlm.logprobs import chosen_logprobs
from common.vlm.model import SplitModel
from common.vlm.prefix import PrefixKV, packed_shape, prefix_backward
from common.vlm.tiny import tiny_config
from common.vlm.verification import split_backward
from common.vlm.verification_cases import make_case


@pytest.fixture(scope="module")
def bound():
    return bound_model(tiny_config(), dtype=torch.float32, train_vision=True)


def score(split, case, prefix, **options):
    return split.response_logprobs(
        last_token=case.prompt.last_token,
        start_position=case.prompt.start_position,
        prefix=prefix,
        tokens_T=torch.cat(case.responses),
        lengths_G=[len(r) for r in case.responses],
        **{"temperature": 1.0, "suppressed": None, **options},
    )


def encode(split, case, **options):
    return split.prefix_kv(case.prompt, split.vision_embeddings(case.prompt), **options)


def test_prefix_bits_do_not_depend_on_grad_mode_or_checkpointing(bound):
    split = SplitModel(bound.model)
    case = make_case(bound.model.config, (1,), images=[(1, 16, 20)], videos=[(3, 8, 8)])
    with torch.no_grad():
        plain = encode(split, case)
    for other in (encode(split, case), encode(split, case, checkpointing=True)):
        for a, b in zip((*plain.keys, *plain.values), (*other.keys, *other.values), strict=True):
            assert torch.equal(a, b)


def test_a_tower_in_bfloat16_sees_no_more_than_rounded_pixels():
    split = SplitModel(bound_model(tiny_config(), dtype=torch.bfloat16, train_vision=False).model)
    exact = make_case(split.config, (1,), images=[(1, 16, 20)], videos=[(3, 8, 8)]).prompt
    rounded = dataclasses.replace(
        exact,
        pixel_values=exact.pixel_values.to(torch.bfloat16),
        pixel_values_videos=exact.pixel_values_videos.to(torch.bfloat16),
    )
    assert not torch.equal(rounded.pixel_values.float(), exact.pixel_values)
    assert torch.equal(split.vision_embeddings(rounded), split.vision_embeddings(exact))


def test_a_prefix_from_given_embeddings_reads_no_pixels(bound):
    split = SplitModel(bound.model)
    case = make_case(bound.model.config, (1,), images=[(1, 16, 20)], videos=[(3, 8, 8)])
    vision = split.vision_embeddings(case.prompt)
    bare = case.prompt.without_pixels()
    assert bare.pixel_values.untyped_storage().nbytes() == 0
    expected, found = (split.prefix_kv(prompt, vision) for prompt in (case.prompt, bare))
    for a, b in zip(expected.keys, found.keys, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("grad", [False, True])
def test_one_response_changes_no_other_ones_bits(bound, grad):
    split = SplitModel(bound.model)
    config = bound.model.config
    case = make_case(config, (90, 150, 1, 130), images=[(1, 16, 16)])
    changed = make_case(config, (90, 150, 1, 130), images=[(1, 16, 16)])
    changed.responses[1][:] = 199
    with torch.set_grad_enabled(grad):
        prefix = encode(split, case)
        before, after = score(split, case, prefix), score(split, changed, prefix)
    parts = zip(before.split([90, 150, 1, 130]), after.split([90, 150, 1, 130]), strict=True)
    assert [torch.equal(a, b) for a, b in parts] == [True, False, True, True]


def test_a_response_sees_nothing_of_its_future(bound):
    split = SplitModel(bound.model)
    case = make_case(bound.model.config, (40, 40))
    with torch.no_grad():
        prefix = encode(split, case)
        before = score(split, case, prefix)
        case.responses[0][20:] = 50
        after = score(split, case, prefix)
    assert torch.equal(before[:20], after[:20])
    assert not torch.equal(before[20:40], after[20:40])


def test_chunks_and_checkpointing_change_nothing(bound):
    case = make_case(bound.model.config, (9, 7), images=[(1, 4, 4)])
    results = []
    for chunk, checkpointing in ((512, False), (512, True), (3, True)):
        split = SplitModel(bound.model, logit_chunk_tokens=chunk)
        bound.gradients.zero_()
        ones = torch.ones(16)
        split_backward(split, case, ones, temperature=1.0, checkpointing=checkpointing)
        results.append(bound.gradients.clone())
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-5)


def test_suppressed_tokens_have_no_probability(bound):
    config = bound.model.config
    suppressed = torch.tensor(suppressed_token_ids(config))
    assert suppressed.tolist() == sorted([config.image_token_id, config.video_token_id])
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    every = torch.arange(200)
    whole = torch.stack(
        [
            chosen_logprobs(row.expand(200, -1), every, temperature=0.5, suppressed=suppressed)
            for row in logits
        ]
    )
    assert torch.isneginf(whole[:, suppressed]).all()
    torch.testing.assert_close(whole.exp().sum(dim=1), torch.ones(5))
    kept = [i for i in range(200) if i not in suppressed.tolist()]
    expected = torch.log_softmax(logits[:, kept] / 0.5, dim=1)
    torch.testing.assert_close(whole[:, kept], expected)


def test_empty_responses_contribute_nothing(bound):
    split = SplitModel(bound.model)
    case = make_case(bound.model.config, (0, 0))
    assert score(split, case, encode(split, case)).shape == (0,)


def test_lengths_must_fit_the_tokens(bound):
    split = SplitModel(bound.model)
    case = make_case(bound.model.config, (3, 4))
    prefix = encode(split, case)
    for lengths in ([3, 3], [8, -1], []):
        with pytest.raises(ResponseInvalid, match="response lengths"):
            split.response_logprobs(
                last_token=9,
                start_position=3,
                prefix=prefix,
                tokens_T=torch.cat(case.responses),
                lengths_G=lengths,
                temperature=1.0,
                suppressed=None,
            )


def test_features_must_match_the_placeholders(bound):
    split = SplitModel(bound.model)
    case = make_case(bound.model.config, (1,), images=[(1, 4, 4)])
    with pytest.raises(PromptInvalid, match="4 vision tokens and 3 features"):
        split.prefix_kv(case.prompt, split.vision_embeddings(case.prompt)[:3])


def test_pack_and_unpack(bound):
    split = SplitModel(bound.model)
    case = make_case(bound.model.config, (1,), images=[(1, 4, 4)])
    prefix = encode(split, case)
    buffer = torch.full(packed_shape(split.config, prefix.tokens), float("nan"))
    prefix.pack(buffer)
    again = PrefixKV.unpack(buffer)
    assert all(torch.equal(a, b) for a, b in zip(prefix.keys, again.keys, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(prefix.values, again.values, strict=True))
    assert again.keys[0].data_ptr() == buffer.data_ptr()
    with pytest.raises(PromptInvalid, match="buffer for prefix"):
        prefix.pack(buffer[:, :, :, 1:])


def test_response_gradients_land_in_the_buffer_and_do_not_touch_the_weights_of_the_prefix(bound):
    split = SplitModel(bound.model)
    case = make_case(bound.model.config, (3, 2), images=[(1, 4, 4)])
    prefix = encode(split, case)
    buffer = torch.zeros(packed_shape(split.config, prefix.tokens))
    prefix.pack(buffer)
    gradient = torch.zeros_like(buffer)
    bound.gradients.zero_()
    score(split, case, PrefixKV.leaves(buffer, gradient)).sum().backward()
    visual = bound.model.model.visual.patch_embed.proj.weight
    assert all(gradient[layer, part].abs().sum() > 0 for layer in range(2) for part in range(2))
    assert visual.grad.abs().sum() == 0
    prefix_backward(prefix, gradient)
    assert visual.grad.abs().sum() > 0
    bound.gradients.zero_()


def test_a_frozen_model_has_no_prefix_graph():
    bound = bound_model(tiny_config(), dtype=torch.float32, train_vision=False)
    bound.model.requires_grad_(requires_grad=False)
    split = SplitModel(bound.model)
    case = make_case(bound.model.config, (2,), images=[(1, 4, 4)])
    prefix = encode(split, case)
    assert not prefix.keys[0].requires_grad
    prefix_backward(prefix, torch.ones(packed_shape(split.config, prefix.tokens)))
    assert bound.gradients.abs().sum() == 0


def test_frozen_tower_gives_embeddings_without_a_graph():
    bound = bound_model(tiny_config(), dtype=torch.float32, train_vision=False)
    case = make_case(bound.model.config, (2,), images=[(1, 4, 4)], videos=[(2, 4, 4)])
    embeddings = SplitModel(bound.model).vision_embeddings(case.prompt)
    assert embeddings.shape == (12, 64)
    assert not embeddings.requires_grad


def test_bfloat16_with_float32_accumulators_is_near_float32():
    gradients = {}
    for dtype in (torch.float32, torch.bfloat16):
        bound = bound_model(
            tiny_config(), dtype=dtype, gradient_dtype=torch.float32, train_vision=True
        )
        case = make_case(bound.model.config, (6, 3), images=[(1, 6, 8)])
        split = SplitModel(bound.model)
        logprobs = split_backward(split, case, torch.ones(9), temperature=1.0, checkpointing=True)
        assert logprobs.dtype == torch.float32
        gradients[dtype] = bound.gradients
    difference = (gradients[torch.bfloat16] - gradients[torch.float32]).norm()
    assert 0 < difference < 0.05 * gradients[torch.float32].norm()
