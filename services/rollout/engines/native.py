"""The project's own engine: continuous batching over groups that share one copy of their prefix.

Shapes: R = rows (sequences that get a token in this iteration), G = responses of a group,
B = slots for groups, N = most new tokens, V = vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.rl.philox import uniforms
from common.rl.sampling import sample, score
from common.vlm.decode import decode_rows, start_groups
from common.vlm.decode_pool import DecodePool
from services.rollout.engines.decoding import DecodingGroup, split_recording
from services.rollout.engines.errors import EngineStateInvalid, GroupRequestInvalid
from services.rollout.engines.order import AdmissionOrder
from services.rollout.engines.protocol import Iteration

if TYPE_CHECKING:
    from torch import Tensor

    from common.ids import GroupId
    from common.vlm.model import SplitModel
    from common.vlm.prefix import PrefixKV
    from services.rollout.engines.protocol import FinishedGroup, GroupRequest, StepSpec

_PREFIX_STEP_TOKENS = 64
"""The prefix capacity of the slots grows in steps of this many tokens."""

Row = tuple[DecodingGroup, int]
"""A group and the index of one of its responses."""


class NativeEngine:
    """Implements `services.rollout.engines.protocol.Engine` on the split model.

    Args:
        model: the policy; its weights are only read.
        max_slots: most sequences that decode at the same time, as in the recipe.
    """

    def __init__(self, model: SplitModel, *, max_slots: int) -> None:
        self._model = model
        self._max_slots = max_slots
        self._spec: StepSpec | None = None
        self._order = AdmissionOrder(())
        self._decoding: list[DecodingGroup] = []
        self._pool: DecodePool | None = None
        self._uniforms_BGN: Tensor | None = None
        self._iterations = 0

    @property
    def capacity(self) -> int:
        """See `Engine.capacity`."""
        if self._spec is None:
            return 0
        return min(self._max_slots // self._spec.samples_per_group, len(self._spec.groups))

    @property
    def active_rows(self) -> int:
        """See `Engine.active_rows`."""
        return sum(len(group.active) for group in self._decoding)

    @property
    def memory_bytes(self) -> int:
        """See `Engine.memory_bytes`."""
        return 0 if self._pool is None else self._pool.nbytes

    @property
    def finished(self) -> bool:
        """See `Engine.finished`."""
        return not self._decoding and self._order.next_group is None

    def begin_step(self, spec: StepSpec) -> None:
        """See `Engine.begin_step`.

        Raises: EngineStateInvalid if the previous step is not over; GroupRequestInvalid if one
            group has more responses than there are rows.
        """
        if not self.finished:
            raise EngineStateInvalid(f"step {self._step.step} is not finished: abort it first")
        if not 1 <= spec.samples_per_group <= self._max_slots:
            raise GroupRequestInvalid(
                f"samples_per_group = {spec.samples_per_group}: must be from 1 to the engine's "
                f"{self._max_slots} rows"
            )
        # Slots of another number or size would make another batch; each step has a pool of its own.
        self._pool = None
        self._uniforms_BGN = None
        self._spec = spec
        self._order = AdmissionOrder(spec.groups)
        self._iterations = 0

    def add_group(self, request: GroupRequest) -> None:
        """See `Engine.add_group`.

        Raises: GroupRequestInvalid if the request does not fit the step; EngineStateInvalid if the
            group was added before.
        """
        spec = self._step
        if (request.recorded is not None) != spec.forced:
            needed = "with" if spec.forced else "without"
            raise GroupRequestInvalid(
                f"group {request.group}: must come {needed} recorded responses in this step"
            )
        if request.recorded is not None:
            split_recording(request.recorded, spec)
        self._order.add(request)

    def drop_group(self, group: GroupId) -> None:
        """See `Engine.drop_group`.

        Raises: GroupRequestInvalid for a group that the step does not have.
        """
        self._order.drop(group)
        for decoding in self._decoding:
            if decoding.group == group and self._pool is not None:
                self._pool.release(decoding.slot)
        self._decoding = [decoding for decoding in self._decoding if decoding.group != group]

    def needs_next_group(self) -> bool:
        """See `Engine.needs_next_group`."""
        return self._must_admit and not self._order.next_is_ready

    @torch.no_grad()
    def admit_next(self) -> GroupId | None:
        """See `Engine.admit_next`. Runs the group's prefix forward if no K/V was given."""
        if not self._must_admit or not self._order.next_is_ready:
            return None
        request = self._order.take_next()
        prefix = self._prefix(request)
        pool = self._pool_for(prefix.tokens)
        slot = pool.admit(
            prefix,
            last_token=request.prompt.last_token,
            start_position=request.prompt.start_position,
        )
        self._decoding.append(DecodingGroup(request.group, slot, self._step, request.recorded))
        self._draw(request.group, slot)
        return request.group

    @torch.no_grad()
    def run_iteration(self) -> Iteration:
        """See `Engine.run_iteration`.

        Raises: EngineStateInvalid if a group has to be admitted first, or none decodes;
            NonFiniteLogits if a group that it completes has NaN or infinite log-probabilities.
        """
        if self._must_admit:
            raise EngineStateInvalid(f"group {self._order.next_group} has to be admitted first")
        if not self._decoding or self._pool is None:
            raise EngineStateInvalid("no group is decoding")
        rows = [(group, lane) for group in self._decoding for lane in group.active]
        if rows:
            logits_RV = self._logits(self._pool, rows)
            for (group, lane), token, logprob in zip(
                rows, *self._choose(logits_RV, rows), strict=True
            ):
                group.append(lane, token, logprob)
        self._iterations += 1
        return Iteration(
            number=self._iterations, rows=len(rows), finished=self._collect(self._pool)
        )

    def abort(self) -> None:
        """See `Engine.abort`."""
        if self._pool is not None:
            for group in self._decoding:
                self._pool.release(group.slot)
        self._decoding = []
        self._order = AdmissionOrder(())

    def release(self) -> None:
        """See `Engine.release`."""
        if not self.finished:
            raise EngineStateInvalid(f"step {self._step.step} is not finished: abort it first")
        self._pool = None
        self._uniforms_BGN = None

    @property
    def _step(self) -> StepSpec:
        if self._spec is None:
            raise EngineStateInvalid("no step has begun")
        return self._spec

    @property
    def _must_admit(self) -> bool:
        """Whether there is a place and a group that takes it."""
        return len(self._decoding) < self.capacity and self._order.next_group is not None

    def _prefix(self, request: GroupRequest) -> PrefixKV:
        if request.prefix is not None:
            return request.prefix
        vision = request.vision
        if vision is None:
            width = self._model.language.embed_tokens.embedding_dim
            vision = torch.zeros((0, width), dtype=self._model.dtype, device=self._model.device)
        return self._model.prefix_kv(request.prompt, vision)

    def _pool_for(self, prefix_tokens: int) -> DecodePool:
        """The pool, with room in its slots for a prefix of this length."""
        spec, model = self._step, self._model
        steps = -(-prefix_tokens // _PREFIX_STEP_TOKENS)
        room_tokens = steps * _PREFIX_STEP_TOKENS
        if self._pool is None:
            self._pool = DecodePool(
                model.config,
                groups=self.capacity,
                samples=spec.samples_per_group,
                prefix_tokens=room_tokens,
                response_tokens=spec.params.max_new_tokens - 1,
                dtype=model.dtype,
                device=model.device,
            )
        self._pool.grow(room_tokens)
        return self._pool

    def _draw(self, group: GroupId, slot: int) -> None:
        """Draw the uniforms of all tokens that the group can come to have."""
        spec, device = self._step, self._model.device
        if spec.params.greedy or spec.forced:
            return
        shape = (spec.samples_per_group, spec.params.max_new_tokens)
        if self._uniforms_BGN is None:
            self._uniforms_BGN = torch.zeros(
                (self.capacity, *shape), dtype=torch.float64, device=device
            )
        self._uniforms_BGN[slot] = uniforms(
            spec.seed,
            int(spec.step),
            torch.full((1, 1), int(group), device=device),
            torch.arange(shape[0], device=device).unsqueeze(1),
            torch.arange(shape[1], device=device).unsqueeze(0),
        )

    def _logits(self, pool: DecodePool, rows: list[Row]) -> Tensor:
        """Logits [R, V] of the rows' next tokens.

        Groups are admitted in the order of the step, so the rows of fresh groups are the last ones.
        """
        running = [(group, lane) for group, lane in rows if group.started]
        fresh = [group for group in self._decoding if not group.started]
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

    def _choose(self, logits_RV: Tensor, rows: list[Row]) -> tuple[list[int], list[float]]:
        """The next token of every row and its log-probability, on the host."""
        spec, device = self._step, logits_RV.device
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

    def _collect(self, pool: DecodePool) -> tuple[FinishedGroup, ...]:
        complete = [group for group in self._decoding if not group.active]
        self._decoding = [group for group in self._decoding if group.active]
        for group in complete:
            pool.release(group.slot)
        return tuple(group.finish(self._iterations) for group in complete)
