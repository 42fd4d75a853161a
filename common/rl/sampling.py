"""Sampling of one token a row, as a function of that row's logits and one uniform number.

Shapes: R rows (sequences that decode one token), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from common.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How responses are sampled; the same for all sequences of a step."""

    max_new_tokens: int
    """Most tokens of a response, its stop token included."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response; they are part of it."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = 1.0
    """Least probability mass of the most likely tokens to sample from; 1 is all."""
    top_k: int = 0
    """Number of the most likely tokens to sample from; 0 is all."""
    min_new_tokens: int = 0
    """Fewest tokens of a response, its stop token included."""
    suppressed_token_ids: tuple[int, ...] = ()
    """Tokens that no response may contain; they have probability 0 here and for the scorers."""

    def __post_init__(self) -> None:
        _require("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1")
        _require("temperature", self.temperature, 0 <= self.temperature < 1e4, "in [0, 10000)")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _require("top_k", self.top_k, self.top_k >= 0, "at least 0 (0 is all)")
        _require(
            "min_new_tokens",
            self.min_new_tokens,
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f"from 0 to max_new_tokens = {self.max_new_tokens}",
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without randomness."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether less than the whole distribution is sampled from."""
        return self.top_p < 1 or self.top_k > 0


def sample(
    logits_RV: Tensor,
    uniforms_R: Tensor,
    params: SamplingParams,
    *,
    stop_forbidden_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token for every row by inverting its cumulative distribution.

    `top_k` applies first, `top_p` to the rest renormalised; equal logits rank by token id, and at
    least one token stays. The arithmetic is float64 and each row's is its own.

    Args:
        logits_RV: [R, V] floating point, unscaled; not changed.
        uniforms_R: [R] float64 in [0, 1); not read when greedy.
        stop_forbidden_R: [R] bool; rows that may not take a stop token now. Like `top_k` it limits
            what is sampled, not the distribution of the returned log-probability.
    Returns:
        tokens_R: [R] int64.
        logprobs_R: [R] float64; log-probability of the token under the distribution that a scorer
            recomputes: suppressed, divided by the temperature (by 1 when greedy), not truncated.
            NaN where a row's logits are; then its token means nothing.
    Sync: none.
    """
    scaled_RV = _scaled(logits_RV, params)
    cumulative_RV = _cumulative(scaled_RV)
    allowed_RV = scaled_RV
    if stop_forbidden_R is not None and params.stop_token_ids:
        stops = _ids(params.stop_token_ids, logits_RV.device)
        without_stops_RV = scaled_RV.index_fill(1, stops, float("-inf"))
        allowed_RV = torch.where(stop_forbidden_R.unsqueeze(1), without_stops_RV, scaled_RV)
    if params.greedy:
        tokens_R = _first_maximum(allowed_RV)
    elif params.truncates or allowed_RV is not scaled_RV:
        tokens_R = _invert(_truncated(allowed_RV, params).cumsum(dim=1), uniforms_R)
    else:
        tokens_R = _invert(cumulative_RV, uniforms_R)
    return tokens_R, _logprobs(scaled_RV, cumulative_RV, tokens_R)


def score(logits_RV: Tensor, tokens_R: Tensor, params: SamplingParams) -> Tensor:
    """The log-probabilities that `sample` returns for these tokens, however they were chosen.

    Args:
        logits_RV: [R, V] floating point, unscaled; not changed.
        tokens_R: [R] int64.
    Returns: [R] float64; -infinity for a suppressed token.
    """
    scaled_RV = _scaled(logits_RV, params)
    return _logprobs(scaled_RV, _cumulative(scaled_RV), tokens_R)


def _scaled(logits_RV: Tensor, params: SamplingParams) -> Tensor:
    """Suppressed logits [R, V] over the temperature, in float64, with a maximum of 0."""
    scaled_RV = logits_RV.to(torch.float64)
    if not params.greedy:
        scaled_RV = scaled_RV / params.temperature
    if params.suppressed_token_ids:
        suppressed = _ids(params.suppressed_token_ids, logits_RV.device)
        scaled_RV = scaled_RV.index_fill(1, suppressed, float("-inf"))
    return scaled_RV - scaled_RV.amax(dim=1, keepdim=True)


def _cumulative(scaled_RV: Tensor) -> Tensor:
    """Unnormalised cumulative distribution [R, V].

    Its end is the normaliser: this sum runs along each row alone, whatever the batch's shape.
    """
    return scaled_RV.exp().cumsum(dim=1)


def _logprobs(scaled_RV: Tensor, cumulative_RV: Tensor, tokens_R: Tensor) -> Tensor:
    chosen_R = scaled_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)
    return chosen_R - cumulative_RV[:, -1].log()


def _truncated(allowed_RV: Tensor, params: SamplingParams) -> Tensor:
    """Unnormalised probabilities [R, V] with 0 for all tokens that top_k and top_p leave out."""
    weight_RV = (allowed_RV - allowed_RV.amax(dim=1, keepdim=True)).exp()
    if not params.truncates:
        return weight_RV
    ranked_RV, order_RV = torch.sort(weight_RV, dim=1, descending=True, stable=True)
    keep_RV = torch.ones_like(ranked_RV, dtype=torch.bool)
    if params.top_k > 0:
        keep_RV[:, params.top_k :] = False
        ranked_RV = ranked_RV * keep_RV
    if params.top_p < 1:
        mass_RV = ranked_RV.cumsum(dim=1)
        before_RV = torch.nn.functional.pad(mass_RV[:, :-1], (1, 0))
        keep_RV &= before_RV < params.top_p * mass_RV[:, -1:]
    return weight_RV * torch.zeros_like(keep_RV).scatter_(1, order_RV, keep_RV)


def _invert(cumulative_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """First token whose cumulative weight exceeds uniform x total; never one of weight 0."""
    # At most (1 - 2**-53) x total, the product never rounds up to the total: one always exceeds it.
    target_R1 = (uniforms_R * cumulative_RV[:, -1]).unsqueeze(1)
    tokens_R = torch.searchsorted(cumulative_RV, target_R1, right=True).squeeze(1)
    return tokens_R.clamp_(max=cumulative_RV.shape[1] - 1)  # in rows of NaN nothing exceeds


def _first_maximum(scores_RV: Tensor) -> Tensor:
    """Lowest index [R] of each row's maximum."""
    size = scores_RV.shape[1]
    index_V = torch.arange(size, device=scores_RV.device)
    at_maximum_RV = scores_RV == scores_RV.amax(dim=1, keepdim=True)
    return torch.where(at_maximum_RV, index_V, size).amin(dim=1).clamp_(max=size - 1)


@lru_cache(maxsize=64)
def _ids(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """The ids as a tensor, uploaded once: an upload a token would synchronise the device."""
    return torch.tensor(ids, dtype=torch.int64, device=device)


def _require(key: str, value: float, legal: bool, wanted: str) -> None:
    if not legal:
        raise InvalidArgument(f"{key} = {value}: must be {wanted}", key=key, value=value)
