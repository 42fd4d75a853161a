"""Stepping by the device decoder: one graph a token, results read while the next one runs.

The host learns what a step chose, and whose response ended, from one small copy behind it. As long
as groups wait for a place it reads that before it goes on, because an ended group's place is to be
taken at once; afterwards it launches the next step first. A response that ended meanwhile is left
as it is by the device. So tokens, iterations and their numbers are those of `PlainStepping`.

Shapes: G = responses of a group, N = most new tokens, B = slots for groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.tensors.reaper import capturing
from common.vlm.cuda.decode_sampling import Choice
from common.vlm.cuda.decoder import CudaDecoder
from services.rollout.engines.decoding import DecodingGroup
from services.rollout.engines.stepping import fit_pool, group_uniforms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from common.rl.sampling import SamplingParams
    from common.vlm.cuda.decoder import Chosen, Lane
    from common.vlm.decode_pool import DecodePool
    from common.vlm.model import SplitModel
    from common.vlm.prefix import PrefixKV
    from services.rollout.engines.protocol import GroupRequest, StepSpec

_SMALL_BUCKETS = (16, 64)
"""Row numbers with a graph, below the powers of two. A step's time hardly depends on its rows
there, and every graph has to be captured anew for each step's K/V."""


def samples_on_device(params: SamplingParams) -> bool:
    """Whether the decoder can sample like this."""
    return not params.truncates and params.min_new_tokens <= 1


class DeviceStepping:
    """Implements `services.rollout.engines.stepping.Stepping`."""

    def __init__(
        self,
        model: SplitModel,
        spec: StepSpec,
        *,
        slots: int,
        beside: Callable[[], bool] | None = None,
    ) -> None:
        self._model = model
        self._beside = beside
        self._spec = spec
        self._slots = slots
        self._pool: DecodePool | None = None
        self._decoder: CudaDecoder | None = None
        self._rows: list[Lane] = []
        self._bucket = 0
        self._flying: Chosen | None = None

    @property
    def nbytes(self) -> int:
        """See `Stepping.nbytes`."""
        if self._pool is None or self._decoder is None:
            return 0
        return self._pool.nbytes + self._decoder.nbytes

    def admit(self, request: GroupRequest, prefix: PrefixKV) -> DecodingGroup:
        """See `Stepping.admit`."""
        assert self._flying is None, "a step was begun ahead of a group"
        longest = self._spec.params.max_new_tokens
        self._pool = fit_pool(
            self._pool,
            self._model,
            self._spec,
            slots=self._slots,
            prefix_tokens=prefix.tokens,
            response_tokens=longest,
        )
        decoder = self._decoder or self._make_decoder(self._pool)
        self._decoder = decoder
        last_token = request.prompt.last_token
        start_position = request.prompt.start_position
        slot = self._pool.admit(prefix, last_token=last_token, start_position=start_position)
        group = DecodingGroup(request.group, slot, self._spec, request.recorded, request.limits)
        decoder.reserve_positions(start_position + longest)
        decoder.start(
            slot,
            last_token=last_token,
            start_position=start_position,
            limits=[max(1, group.limit(each)) for each in range(self._spec.samples_per_group)],
        )
        self._feed(decoder, group)
        self._rows = []
        return group

    def drop(self, group: DecodingGroup) -> None:
        """See `Stepping.drop`; a step that runs may still read its K/V, and comes before others."""
        if self._pool is not None:
            self._pool.release(group.slot)

    def advance(self, groups: Sequence[DecodingGroup], *, ahead: bool) -> int:
        """See `Stepping.advance`."""
        rows = [(group, lane) for group in groups for lane in group.active]
        if not rows:
            return 0
        chosen = self._flying or self._launch([(group.slot, lane) for group, lane in rows])
        # those that can have more than the token which is on its way
        more = [(g.slot, lane) for g, lane in rows if g.length(lane) + 1 < g.limit(lane)]
        self._flying = self._launch(more) if ahead and more else None
        tokens = chosen.tokens()
        for group, lane in rows:
            group.append(lane, *tokens[group.slot, lane])
        return len(rows)

    def close(self) -> None:
        """See `Stepping.close`."""
        if self._flying is not None:
            self._flying.wait()
        if self._decoder is not None:
            self._decoder.drop_graphs()
        self._flying = self._decoder = self._pool = None
        self._rows = []

    def _make_decoder(self, pool: DecodePool) -> CudaDecoder:
        params, device = self._spec.params, self._model.device

        def ids(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        choice = Choice(
            temperature=params.temperature,
            forced=self._spec.forced,
            stops=ids(params.stop_token_ids),
            suppressed=ids(params.suppressed_token_ids),
            limits=ids([0] * (pool.groups * pool.samples)),
        )
        return CudaDecoder(self._model, pool, choice)

    def _feed(self, decoder: CudaDecoder, group: DecodingGroup) -> None:
        """Upload the recorded tokens of a group, or draw its uniforms."""
        spec, samples = self._spec, self._spec.samples_per_group
        part = slice(group.slot * samples, (group.slot + 1) * samples)
        if group.recorded is not None:
            longest = spec.params.max_new_tokens
            rows = [row + [0] * (longest - len(row)) for row in group.recorded]
            recorded = torch.tensor(rows, dtype=torch.int32)
            decoder.lanes.recorded[part].copy_(recorded)
        elif not spec.params.greedy:
            decoder.lanes.uniforms[part] = group_uniforms(spec, group.group, self._model.device)

    def _launch(self, rows: list[Lane]) -> Chosen:
        """Begin a step of these lanes."""
        decoder, bucket = self._decoder, bucket_of(len(rows))
        assert decoder is not None
        if rows != self._rows or bucket != self._bucket:
            decoder.set_rows(rows, bucket=bucket)
            self._rows, self._bucket = rows, bucket
        beside = self._beside is not None and self._beside()
        if self._model.device.type == "cuda" and not decoder.has_graph(bucket, beside=beside):
            with capturing():
                decoder.capture(bucket, beside=beside)
        return decoder.step(bucket, beside=beside)


def bucket_of(rows: int) -> int:
    """Rows of the graph that steps this many."""
    for bucket in _SMALL_BUCKETS:
        if rows <= bucket:
            return bucket
    return 1 << (rows - 1).bit_length()
