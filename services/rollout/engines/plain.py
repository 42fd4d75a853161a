"""Stepping by plain tensor operations: every device, dtype and way of sampling.

Shapes: R = rows (sequences that get a token), F = groups that get their first, G = responses of a
group, B = slots for groups, N = most new tokens, V = vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.rl.sampling import sample, score
from common.vlm.decode import decode_rows, start_groups
from services.rollout.engines.decoding import DecodingGroup
from services.rollout.engines.stepping import fit_pool, group_uniforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from common.vlm.decode_pool import DecodePool
    from common.vlm.model import SplitModel
    from common.vlm.prefix import PrefixKV
    from services.rollout.engines.protocol import GroupRequest, StepSpec

Row = tuple[DecodingGroup, int]
"""A group and the index of one of its responses."""


class PlainStepping:
    """Implements `services.rollout.engines.stepping.Stepping`."""

    def __init__(self, model: SplitModel, spec: StepSpec, *, slots: int) -> None:
        self._model = model
        self._spec = spec
        self._slots = slots
        self._pool: DecodePool | None = None
        self._uniforms_BGN: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """See `Stepping.nbytes`."""
        return 0 if self._pool is None else self._pool.nbytes

    def admit(self, request: GroupRequest, prefix: PrefixKV) -> DecodingGroup:
        """See `Stepping.admit`."""
        self._pool = fit_pool(
            self._pool,
            self._model,
            self._spec,
            slots=self._slots,
            prefix_tokens=prefix.tokens,
            response_tokens=self._spec.params.max_new_tokens - 1,
        )
        slot = self._pool.admit(
            prefix,
            last_token=request.prompt.last_token,
            start_position=request.prompt.start_position,
        )
        group = DecodingGroup(request.group, slot, self._spec, request.recorded, request.limits)
        self._draw(group)
        return group

    def drop(self, group: DecodingGroup) -> None:
        """See `Stepping.drop`."""
        if self._pool is not None:
            self._pool.release(group.slot)

    def advance(self, groups: Sequence[DecodingGroup], *, ahead: bool) -> int:
        """See `Stepping.advance`; nothing is begun ahead."""
        del ahead
        rows = [(group, lane) for group in groups for lane in group.active]
        if rows:
            assert self._pool is not None
            logits_RV = self._logits(self._pool, groups, rows)
            for (group, lane), token, logprob in zip(
                rows, *self._choose(logits_RV, rows), strict=True
            ):
                group.append(lane, token, logprob)
        return len(rows)

    def close(self) -> None:
        """See `Stepping.close`."""
        self._pool = None
        self._uniforms_BGN = None

    def _draw(self, group: DecodingGroup) -> None:
        """Draw the uniforms of all tokens that the group can come to have."""
        spec, device = self._spec, self._model.device
        if spec.params.greedy or spec.forced:
            return
        if self._uniforms_BGN is None:
            shape = (self._slots, spec.samples_per_group, spec.params.max_new_tokens)
            self._uniforms_BGN = torch.zeros(shape, dtype=torch.float64, device=device)
        self._uniforms_BGN[group.slot] = group_uniforms(spec, group.group, device)

    def _logits(
        self, pool: DecodePool, groups: Sequence[DecodingGroup], rows: Sequence[Row]
    ) -> Tensor:
        """Logits [R, V] of the rows' next tokens.

        Groups are admitted in the order of the step, so the rows of fresh groups are the last ones.
        """
        running = [(group, lane) for group, lane in rows if group.started]
        fresh = [group for group in groups if not group.started]
        parts = []
        if running:
            last = [group.last_token(lane) for group, lane in running]
            parts.append(
                decode_rows(
                    self._model,
                    pool,
                    [group.slot for group, _ in running],
                    [lane for _, lane in running],
                    torch.tensor(last, device=self._model.device),
                )
            )
        if fresh:
            first_FV = start_groups(self._model, pool, [group.slot for group in fresh])
            counts = torch.tensor([len(group.active) for group in fresh], device=first_FV.device)
            parts.append(first_FV.repeat_interleave(counts, dim=0))
            for group in fresh:
                group.started = True
        return torch.cat(parts)

    def _choose(self, logits_RV: Tensor, rows: Sequence[Row]) -> tuple[list[int], list[float]]:
        """The next token of every row and its log-probability, on the host."""
        spec, device = self._spec, logits_RV.device
        if spec.forced:
            tokens = [group.recorded_token(lane) for group, lane in rows]
            logprobs_R = score(logits_RV, torch.tensor(tokens, device=device), spec.params)
            return tokens, logprobs_R.tolist()
        positions = [group.length(lane) for group, lane in rows]
        positions_R = torch.tensor(positions, device=device)
        if self._uniforms_BGN is None:
            uniforms_R = torch.zeros(len(rows), dtype=torch.float64, device=device)
        else:
            slots_R = torch.tensor([group.slot for group, _ in rows], device=device)
            lanes_R = torch.tensor([lane for _, lane in rows], device=device)
            uniforms_R = self._uniforms_BGN[slots_R, lanes_R, positions_R]
        forbidden_R = None
        if spec.params.min_new_tokens > 1:
            forbidden_R = positions_R < spec.params.min_new_tokens - 1
        tokens_R, logprobs_R = sample(
            logits_RV, uniforms_R, spec.params, stop_forbidden_R=forbidden_R
        )
        return tokens_R.tolist(), logprobs_R.tolist()
