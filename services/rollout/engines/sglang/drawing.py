"""Which token a request draws: a function of run, step, group, sample, position and its logits.

It is the native engine's: neither the batch nor the order of requests has a part in it.

Shapes: R rows, one a request; V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import torch

from common.rl.philox import uniforms
from common.rl.sampling import SamplingParams, sample

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What a request's tokens are drawn by; the first four are the same for a whole step.

    Attributes:
        seed: the run's.
        step: index of the training step.
        temperature, top_p, top_k: as in `SamplingParams`.
        group: id of the group.
        sample: number of the response in it.
        prompt_tokens: before the response.
    """

    seed: int
    step: int
    temperature: float
    top_p: float
    top_k: int
    group: int
    sample: int
    prompt_tokens: int

    def to_json(self) -> dict[str, Any]:
        """As a request carries it."""
        return asdict(self)

    @classmethod
    def of(cls, carried: Mapping[str, Any]) -> Self:
        """What `to_json` made; SGLang adds entries of its own to it."""
        return cls(**{name: carried[name] for name in cls.__slots__})


def draw(logits_RV: Tensor, draws_R: Sequence[Draws], positions_R: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a token for each request; all of them are of one step.

    Args:
        logits_RV: [R, V] floating point; minus infinity for what may not be sampled. Not changed.
        positions_R: [R] integers, same device; of the newest token in its sequence.
    Returns: tokens [R] int64 and their log-probabilities [R] float64; see `sample`.
    Sync: none.
    """
    step = draws_R[0]
    numbers_R3 = torch.tensor(
        [[each.group, each.sample, each.prompt_tokens] for each in draws_R],
        dtype=torch.int64,
        # a copy from memory that is not pinned would wait for the device
        pin_memory=logits_RV.is_cuda,
    )
    numbers_3R = numbers_R3.to(logits_RV.device, non_blocking=True).T
    group_R, sample_R, prompt_R = numbers_3R.unbind(0)
    index_R = positions_R.to(torch.int64) + 1 - prompt_R
    uniforms_R = uniforms(step.seed, step.step, group_R, sample_R, index_R)
    return sample(logits_RV, uniforms_R, _params(step.temperature, step.top_p, step.top_k))


@lru_cache(maxsize=8)
def _params(temperature: float, top_p: float, top_k: int) -> SamplingParams:
    """Ends, lengths and suppressed tokens are SGLang's to watch."""
    return SamplingParams(
        max_new_tokens=1, stop_token_ids=(), temperature=temperature, top_p=top_p, top_k=top_k
    )
