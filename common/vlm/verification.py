"""The split pass and the decode kernels held against the unmodified library model.

The library's ``forward`` runs once a response over the whole sequence, prompt and response, and
its autograd gives the reference gradients. Both passes use the same bound parameters. A float64
model is verified in `KeepFloat64`, which makes the library's float32 steps float64 in both passes.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.vlm.decode import decode_rows, start_groups
from common.vlm.decode_pool import DecodePool
from common.vlm.loading import suppressed_token_ids
from common.vlm.logprobs import chosen_logprobs
from common.vlm.model import SplitModel
from common.vlm.precision import KeepFloat64
from common.vlm.prefix import PrefixKV, packed_shape, prefix_backward
from common.vlm.prompt import PromptTensors, prompt_positions, token_types
from common.weights.binding import views

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Qwen2_5_VLForConditionalGeneration

    from common.vlm.bound import BoundModel

NOISE_FLOOR = 1e-13
"""A gradient below this fraction of the largest one counts as an exact zero, give or take
rounding; only softmax over a single key and the like make such tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCase:
    """One group.

    Attributes:
        prompt: on the model's device.
        responses: [n] int64 tokens of each response; n may be 0.
    """

    prompt: PromptTensors
    responses: tuple[Tensor, ...]

    def to(self, device: torch.device | str) -> SplitCase:
        """The same group on another device."""
        return SplitCase(
            prompt=self.prompt.to(device), responses=tuple(r.to(device) for r in self.responses)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """How far the split pass is from the library.

    Attributes:
        max_rel_grad_diff: over parameters, max|split - library| / max|library|.
        worst_parameter: where that is.
        max_logprob_diff: over all response tokens, absolute.
    """

    max_rel_grad_diff: float
    worst_parameter: str
    max_logprob_diff: float


def split_vs_monolithic(
    bound: BoundModel,
    cases: Sequence[SplitCase],
    *,
    checkpointing: bool = False,
    temperature: float = 1.0,
    logit_chunk_tokens: int = 64,
    seed: int = 0,
) -> SplitReport:
    """Compare log-probabilities and every parameter's gradient over a batch of groups.

    The loss is the sum over tokens of a random coefficient times the log-probability. The
    gradient accumulator is overwritten, and zero afterwards.

    Args:
        bound: parameters with a gradient accumulator.
        cases: the groups.
        checkpointing: of the split pass, tower, prefix and responses.
        temperature: of the log-probabilities.
        logit_chunk_tokens: rows of logits alive at once in the split pass.
        seed: of the coefficients.
    """
    split = SplitModel(bound.model, logit_chunk_tokens=logit_chunk_tokens)
    generator = torch.Generator().manual_seed(seed)
    coefficients = [
        torch.randn(sum(len(r) for r in case.responses), generator=generator).to(bound.weights)
        for case in cases
    ]
    bound.gradients.zero_()
    exact = KeepFloat64() if bound.weights.dtype == torch.float64 else nullcontext()
    with exact:
        expected = [
            monolithic_backward(bound.model, case, weight_T, temperature=temperature)
            for case, weight_T in zip(cases, coefficients, strict=True)
        ]
        library = {n: g.clone() for n, g in views(bound.gradients, bound.layout).items()}
        bound.gradients.zero_()
        actual = [
            split_backward(
                split, case, weight_T, temperature=temperature, checkpointing=checkpointing
            )
            for case, weight_T in zip(cases, coefficients, strict=True)
        ]
    worst, name = _worst_gradient(views(bound.gradients, bound.layout), library)
    bound.gradients.zero_()
    return SplitReport(
        max_rel_grad_diff=worst,
        worst_parameter=name,
        max_logprob_diff=_max_diff(torch.cat(actual), torch.cat(expected)),
    )


def split_backward(
    split: SplitModel,
    case: SplitCase,
    weight_T: Tensor,
    *,
    temperature: float,
    checkpointing: bool,
) -> Tensor:
    """Forward and backward of one group as the services run it; K/V and gradients via buffers.

    Returns: [T] log-probabilities, detached.
    """
    prompt = case.prompt
    vision = split.vision_embeddings(prompt, checkpointing=checkpointing)
    prefix = split.prefix_kv(prompt, vision, checkpointing=checkpointing)
    shape = packed_shape(split.config, prompt.prefix_tokens, kv_heads=split.kv_heads)
    buffer = torch.zeros(shape, dtype=split.dtype, device=split.device)
    gradient = torch.zeros_like(buffer)
    prefix.pack(buffer)
    logprobs_T = split.response_logprobs(
        last_token=prompt.last_token,
        start_position=prompt.start_position,
        prefix=PrefixKV.leaves(buffer, gradient),
        tokens_T=torch.cat(case.responses),
        lengths_G=[len(response) for response in case.responses],
        temperature=temperature,
        suppressed=_suppressed(split),
        checkpointing=checkpointing,
    )
    if logprobs_T.requires_grad:
        (logprobs_T * weight_T).sum().backward()
    prefix_backward(prefix, gradient)
    return logprobs_T.detach()


def monolithic_backward(
    model: Qwen2_5_VLForConditionalGeneration,
    case: SplitCase,
    weight_T: Tensor,
    *,
    temperature: float,
) -> Tensor:
    """One library forward and backward a response over the whole sequence.

    Returns: [T] log-probabilities, detached.
    """
    suppressed = torch.tensor(suppressed_token_ids(model.config), device=weight_T.device)
    results = [weight_T.new_zeros(0)]
    for response, weight in zip(
        case.responses, weight_T.split([len(r) for r in case.responses]), strict=True
    ):
        if len(response) == 0:
            continue
        logits = monolithic_logits(model, case.prompt, response)
        logprobs = chosen_logprobs(logits, response, temperature=temperature, suppressed=suppressed)
        (logprobs * weight).sum().backward()
        results.append(logprobs.detach())
    return torch.cat(results)


def monolithic_logits(
    model: Qwen2_5_VLForConditionalGeneration, prompt: PromptTensors, response: Tensor
) -> Tensor:
    """[n, C]: the library's logits of each response token, with positions of the whole sequence."""
    ids = torch.cat((prompt.token_ids, response))
    types = token_types(model.config, ids)
    positions = prompt_positions(
        model.config,
        mm_token_type_ids=types,
        image_grid_thw=prompt.image_grid_thw,
        video_grid_thw=prompt.video_grid_thw,
        second_per_grid_ts=prompt.second_per_grid_ts,
    )
    has_image, has_video = len(prompt.image_grid_thw) > 0, len(prompt.video_grid_thw) > 0
    output = model(
        input_ids=ids[None],
        position_ids=positions[:, None].to(ids.device),
        mm_token_type_ids=types[None],
        pixel_values=prompt.pixel_values if has_image else None,
        image_grid_thw=prompt.image_grid_thw if has_image else None,
        pixel_values_videos=prompt.pixel_values_videos if has_video else None,
        video_grid_thw=prompt.video_grid_thw if has_video else None,
        use_cache=False,
    )
    return output.logits[0, prompt.prefix_tokens : -1]


@torch.no_grad()
def decode_vs_monolithic(bound: BoundModel, cases: Sequence[SplitCase]) -> float:
    """Largest difference between decode-kernel and library logits, responses given.

    All groups are decoded together; a lane stops when its response ends.

    Args:
        bound: any model.
        cases: groups, at least one token in each of them.
    """
    split = SplitModel(bound.model)
    pool = DecodePool(
        split.config,
        groups=len(cases),
        samples=max(len(case.responses) for case in cases),
        prefix_tokens=max(case.prompt.prefix_tokens for case in cases),
        response_tokens=max(len(r) for case in cases for r in case.responses),
        dtype=split.dtype,
        device=split.device,
    )
    for case in cases:
        prefix = split.prefix_kv(case.prompt, split.vision_embeddings(case.prompt))
        pool.admit(
            prefix,
            last_token=case.prompt.last_token,
            start_position=case.prompt.start_position,
        )
    rows = {(s, i): r for s, case in enumerate(cases) for i, r in enumerate(case.responses)}
    first = start_groups(split, pool, range(len(cases)))
    decoded = {row: [first[row[0]]] for row, response in rows.items() if len(response) > 0}
    for index in range(pool.response_tokens - 1):
        active = [row for row in decoded if len(rows[row]) > index + 1]
        tokens = torch.stack([rows[row][index] for row in active])
        logits = decode_rows(split, pool, [r[0] for r in active], [r[1] for r in active], tokens)
        for row, row_logits in zip(active, logits, strict=True):
            decoded[row].append(row_logits)
    return max(
        _max_diff(
            torch.stack(logits), monolithic_logits(bound.model, cases[row[0]].prompt, rows[row])
        )
        for row, logits in decoded.items()
    )


def _worst_gradient(actual: dict[str, Tensor], library: dict[str, Tensor]) -> tuple[float, str]:
    floor = NOISE_FLOOR * max(float(g.abs().max()) for g in library.values())
    worst, worst_name = 0.0, ""
    for name, expected in library.items():
        scale = float(expected.abs().max())
        diff = _max_diff(actual[name], expected)
        relative = diff / scale if scale > floor else (math.inf if diff > floor else 0.0)
        # also true for NaN, which no limit admits
        if not relative < worst:
            worst, worst_name = relative, name
    return worst, worst_name


def _max_diff(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max()) if actual.numel() else 0.0


def _suppressed(split: SplitModel) -> Tensor:
    return torch.tensor(suppressed_token_ids(split.config), device=split.device)
