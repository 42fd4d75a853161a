"""What the native engine asks of the code that computes the tokens of one step.

Shapes: G = responses of a group, N = most new tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from common.rl.philox import uniforms
from common.vlm.decode_pool import DecodePool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from common.ids import GroupId
    from common.vlm.model import SplitModel
    from common.vlm.prefix import PrefixKV
    from services.rollout.engines.decoding import DecodingGroup
    from services.rollout.engines.protocol import GroupRequest, StepSpec

_PREFIX_STEP_TOKENS = 64
"""The prefix capacity of the slots grows in steps of this many tokens."""


class Stepping(Protocol):
    """Holds the K/V of a step's groups, and gives each response of them its tokens."""

    @property
    def nbytes(self) -> int:
        """Device bytes of the K/V and what goes with them."""

    def admit(self, request: GroupRequest, prefix: PrefixKV) -> DecodingGroup:
        """Take a group in; its prefix is not needed any more afterwards."""

    def drop(self, group: DecodingGroup) -> None:
        """Free the place of a group, complete or not."""

    def advance(self, groups: Sequence[DecodingGroup], *, ahead: bool) -> int:
        """Append one token to every active response.

        Args:
            groups: all that decode, in the order of their admission.
            ahead: no group will be admitted any more, so that the device may begin with the next
                tokens already.
        Returns: how many responses got one.
        """

    def close(self) -> None:
        """Drop everything, once the device does not use it any more. Idempotent."""


def fit_pool(
    pool: DecodePool | None,
    model: SplitModel,
    spec: StepSpec,
    *,
    slots: int,
    prefix_tokens: int,
    response_tokens: int,
) -> DecodePool:
    """The step's pool, made or grown so that its slots have room for a prefix."""
    room_tokens = -(-prefix_tokens // _PREFIX_STEP_TOKENS) * _PREFIX_STEP_TOKENS
    if pool is None:
        return DecodePool(
            model.config,
            groups=slots,
            samples=spec.samples_per_group,
            prefix_tokens=room_tokens,
            response_tokens=response_tokens,
            dtype=model.dtype,
            device=model.device,
            kv_heads=model.kv_heads,
        )
    pool.grow(room_tokens)
    return pool


def group_uniforms(spec: StepSpec, group: GroupId, device: torch.device) -> Tensor:
    """[G, N] float64: the uniforms of all tokens that a group can come to have."""
    return uniforms(
        spec.seed,
        int(spec.step),
        torch.full((1, 1), int(group), device=device),
        torch.arange(spec.samples_per_group, device=device).unsqueeze(1),
        torch.arange(spec.params.max_new_tokens, device=device).unsqueeze(0),
    )
