"""Decoding on CUDA: one graph of fused kernels for each number of rows, all state on the device.

Shapes: R = rows of a graph, B = slots, S = lanes of a slot, N = most new tokens, I = items.

A lane is fed the last prompt token first, so its private part holds as many tokens as it
generates. Between changes of the set of rows a step needs nothing from the host; what a step
chose is copied to the host behind it, to be read while the next step runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.vlm.cuda.decode_attention import Places, attend, plan_items
from common.vlm.cuda.decode_linear import gated_linear, linear
from common.vlm.cuda.decode_parts import UNUSED, Buffers, Cuts, LayerWeights
from common.vlm.cuda.decode_rows import embed, split_heads, sum_norm
from common.vlm.cuda.decode_sampling import Choice, Lanes, choose
from common.vlm.errors import DecodePoolFull, DecodeStateInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.vlm.decode_pool import DecodePool
    from common.vlm.model import SplitModel

Lane = tuple[int, int]
"""A slot of the pool and a lane of it."""


@dataclass(slots=True, kw_only=True)
class Chosen:
    """What one step chose, on its way to the host.

    Attributes:
        lanes: of the rows.
        samples: S.
        state: [4, B * S] int32 on the host, as `Lanes.state`.
        ready: recorded behind the copy; None where copies are not asynchronous.
    """

    lanes: tuple[Lane, ...]
    samples: int
    state: Tensor
    ready: torch.cuda.Event | None

    def wait(self) -> None:
        """Block until the step is over."""
        if self.ready is not None:
            self.ready.synchronize()

    def tokens(self) -> dict[Lane, tuple[int, float]]:
        """Newest token of every row and its log-probability; waits for the step."""
        self.wait()
        tokens, logprobs = self.state[0].tolist(), self.state[3].view(torch.float32).tolist()
        flat = {(slot, lane): slot * self.samples + lane for slot, lane in self.lanes}
        return {lane: (tokens[at], logprobs[at]) for lane, at in flat.items()}

    def finished(self) -> list[Lane]:
        """The rows' lanes that have ended; waits for the step."""
        self.wait()
        over = self.state[2].tolist()
        return [(slot, lane) for slot, lane in self.lanes if over[slot * self.samples + lane]]


@dataclass(slots=True)
class CudaDecoder:
    """Steps the lanes of a pool; owned and used by one thread, on one stream.

    Attributes:
        model: the policy, bound to flat storage; its weights are read in place.
        pool: `response_tokens` of it must be as many as a lane may generate.
        choice: how tokens are chosen.
        cuts: of the kernels; those that suit each number of rows if not given.
        positions: rows of the tables of angles; no position may be past them.
    """

    model: SplitModel
    pool: DecodePool
    choice: Choice
    cuts: Cuts | None = None
    positions: int = 32768
    lanes: Lanes = field(init=False)
    _items: int = field(init=False)
    _layers: list[LayerWeights] = field(init=False)
    _graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = field(init=False, default_factory=dict)
    _graphed_prefixes: tuple[int, int] = field(init=False, default=(0, 0))
    _buffers: dict[int, Buffers] = field(init=False, default_factory=dict)
    _index: Tensor = field(init=False)
    _rows: tuple[Lane, ...] = field(init=False, default=())
    _angles: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        pool = self.pool
        device, total = pool.shared.device, pool.groups * pool.samples
        self._layers = [LayerWeights.of(layer) for layer in self.model.language.layers]
        self._items = max(pool.groups, (self.cuts or Cuts.of(rows=total)).items)
        self.lanes = Lanes.make(lanes=total, new_tokens=pool.response_tokens, device=device)
        # row of each lane, then the items, then the slots' ranges of items: one upload
        width = total + 3 * self._items + 2 * pool.groups
        self._index = torch.full((width,), UNUSED, dtype=torch.int32, device=device)
        self._angles = self._make_angles()

    @property
    def nbytes(self) -> int:
        """Device bytes that a step's results and parts take, without the pool."""
        held = [self.lanes.uniforms, self.lanes.recorded, self.lanes.chosen, self.lanes.logprobs]
        held += self._angles
        buffers = sum(each.nbytes for each in self._buffers.values())
        return sum(tensor.nbytes for tensor in held) + buffers

    def reserve_positions(self, positions: int) -> None:
        """Make the tables of angles at least this long; graphs have to be captured anew then."""
        if positions > self.positions:
            self.positions = 1 << (positions - 1).bit_length()
            self._angles = self._make_angles()
            self.drop_graphs()

    def start(
        self, slot: int, *, last_token: int, start_position: int, limits: Sequence[int]
    ) -> None:
        """Make all lanes of an admitted slot ready to be fed the last prompt token.

        Args:
            slot: of the pool.
            last_token: id of the last prompt token.
            start_position: its position.
            limits: most tokens of each lane, at least 1.
        Raises: DecodePoolFull if a limit or a position is past the capacity.
        """
        pool = self.pool
        if max(limits) > pool.response_tokens or min(limits) < 1:
            raise DecodePoolFull(
                f"limits {list(limits)}: lanes hold from 1 to {pool.response_tokens} tokens"
            )
        if start_position + pool.response_tokens > self.positions:
            raise DecodePoolFull(
                f"position {start_position} and {pool.response_tokens} tokens more are past the "
                f"{self.positions} positions of this decoder"
            )
        part = slice(slot * pool.samples, (slot + 1) * pool.samples)
        self.lanes.token[part] = last_token
        self.lanes.position[part] = start_position
        self.lanes.tokens[part] = 0
        self.lanes.finished[part] = 0
        _upload(self.choice.limits[part], limits)

    def set_rows(self, rows: Sequence[Lane], *, bucket: int) -> None:
        """Choose the lanes that the next steps advance.

        Args:
            rows: each once, at most `bucket`.
            bucket: R of the steps.
        Raises: DecodeStateInvalid for too many rows, or one named twice.
        """
        pool = self.pool
        if len(rows) > bucket or len(set(rows)) != len(rows):
            raise DecodeStateInvalid(
                f"{len(rows)} rows do not fit {bucket} rows, or a row is named twice"
            )
        lane_row = [UNUSED] * (pool.groups * pool.samples)
        flat = [slot * pool.samples + lane for slot, lane in rows]
        for row, lane in enumerate(flat):
            lane_row[lane] = row
        at = self._buffers_of(bucket)
        items, ranges = plan_items(
            [(slot, pool.slot(slot).shared_tokens) for slot in sorted({row[0] for row in rows})],
            slots=pool.groups,
            items=self._items,
            block=at.cuts.attention.prefix_keys,
        )
        _upload(self._index, lane_row + items + ranges)
        _upload(at.row_lane, flat + [UNUSED] * (bucket - len(flat)))
        self._rows = tuple(rows)

    def has_graph(self, bucket: int, *, beside: bool = False) -> bool:
        """Whether `step` would replay a graph; growing the pool makes all graphs stale."""
        prefixes = (self.pool.shared.data_ptr(), self.pool.prefix_tokens)
        if self._graphs and prefixes != self._graphed_prefixes:
            self.drop_graphs()
        return (bucket, beside) in self._graphs

    def capture(self, bucket: int, *, beside: bool = False) -> None:
        """Record the graph of R rows.

        Nothing may wait for the device meanwhile, in whichever thread.

        Args:
            bucket: R.
            beside: the graph is for when others use a part of the SMs.
        """
        at, kept, cuts = self._buffers_of(bucket), self._rows, self._cuts_of(bucket, beside=beside)
        side = _capture_stream(self.pool.shared.device)
        self.has_graph(bucket)
        self._graphed_prefixes = (self.pool.shared.data_ptr(), self.pool.prefix_tokens)
        _upload(at.row_lane, [UNUSED] * bucket)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            # compiles, connects ranks, and makes the libraries allocate what they keep
            self._run(at, cuts)
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._run(at, cuts)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        self._graphs[bucket, beside] = graph
        if kept:
            self.set_rows(kept, bucket=bucket)

    def drop_graphs(self) -> None:
        """Forget all graphs, once none runs any more."""
        if self._graphs:
            torch.cuda.current_stream(self.pool.shared.device).synchronize()
            self._graphs.clear()

    @torch.no_grad()
    def step(self, bucket: int, *, beside: bool = False) -> Chosen:
        """Advance the rows of `set_rows` by one token, on the current stream.

        Without a captured graph the kernels are launched one by one. Lanes that have ended, or
        end meanwhile, stay as they are.

        Args:
            bucket: R, the same as in `set_rows`.
            beside: whether others use a part of the SMs; a matter of speed only.
        """
        if self.has_graph(bucket, beside=beside):
            self._graphs[bucket, beside].replay()
        else:
            self._run(self._buffers_of(bucket), self._cuts_of(bucket, beside=beside))
        source, samples = self.lanes.state, self.pool.samples
        if not source.is_cuda:
            return Chosen(lanes=self._rows, samples=samples, state=source.clone(), ready=None)
        state = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        state.copy_(source, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Chosen(lanes=self._rows, samples=samples, state=state, ready=ready)

    def _buffers_of(self, bucket: int) -> Buffers:
        if bucket not in self._buffers:
            cuts = self._cuts_of(bucket, beside=False)
            self._buffers[bucket] = Buffers.make(
                self.model, self.pool, cuts, rows=bucket, items=self._items
            )
        return self._buffers[bucket]

    def _cuts_of(self, bucket: int, *, beside: bool) -> Cuts:
        if self.cuts is not None:
            return self.cuts
        cuts = Cuts.of(rows=bucket, beside=beside)
        return cuts if self.pool.shared.is_cuda else replace(cuts, early=False)

    @torch.no_grad()
    def _make_angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions, each [positions, D]."""
        device = self.pool.shared.device
        place = torch.arange(self.positions, device=device)
        sample = torch.empty((1, 1, 1), dtype=self.model.dtype, device=device)
        cos, sin = self.model.language.rotary_emb(sample, place.expand(3, 1, -1))
        return cos[0].contiguous(), sin[0].contiguous()

    def _run(self, at: Buffers, cuts: Cuts) -> None:
        """One step's kernels, all of fixed addresses."""
        language, lanes, early = self.model.language, self.lanes, cuts.early
        tokens, exchange = language.embed_tokens.weight.detach(), at.exchange
        first = None if exchange is None else exchange.group.rank * tokens.shape[0]
        embed(tokens, at.row_lane, lanes.token, at.hidden, first=first, early=early)
        if exchange is not None:
            exchange.group.sum(at.hidden)
        total = self.pool.groups * self.pool.samples
        places = Places(
            row_lane=at.row_lane,
            lane_row=self._index[:total],
            lane_tokens=lanes.tokens,
            items=self._index[total : total + 3 * self._items],
            ranges=self._index[total + 3 * self._items :],
        )
        added = None
        for number in range(len(self._layers)):
            added = self._run_layer(number, at, added, places, cuts)
        norm, eps = language.norm.weight.detach(), language.norm.variance_epsilon
        alone = early and exchange is None
        sum_norm(at.hidden, added, norm, eps, at.normed, early=alone)
        linear(at.normed, self.model.head.weight.detach(), at.logits, cuts.head, early=early)
        logits = at.logits[0]
        if exchange is not None:
            logits = exchange.gather_logits(logits)
        choose(logits, at.row_lane, lanes, self.choice, at.facts, early=alone)

    def _run_layer(
        self, number: int, at: Buffers, added: Tensor | None, places: Places, cuts: Cuts
    ) -> Tensor:
        """One layer's kernels.

        Args: added: [s, R, h], what the layer before has to add to the hidden states.
        Returns: [s, R, h], what this layer has to.
        """
        layer, early = self._layers[number], cuts.early
        # behind a collective a kernel is launched when that has ended
        alone = early and at.exchange is None
        sum_norm(at.hidden, added, layer.first_norm, layer.eps, at.normed, early=alone)
        linear(at.normed, layer.qkv, at.qkv, cuts.qkv, early=early)
        split_heads(
            at.qkv,
            layer.qkv_bias,
            at.query,
            self.pool.private[number],
            row_lane=at.row_lane,
            lane_tokens=self.lanes.tokens,
            lane_position=self.lanes.position,
            cosines=self._angles[0],
            sines=self._angles[1],
            early=early,
        )
        attend(
            at.query,
            self.pool.shared[number],
            self.pool.private[number],
            at.attended,
            places=places,
            scratch=at.scratch,
            blocks=cuts.attention,
            early=early,
        )
        linear(at.attended.flatten(1), layer.out, at.out, cuts.out, early=early)
        out = at.out if at.exchange is None else at.exchange.sum_parts(at.out)
        sum_norm(at.hidden, out, layer.second_norm, layer.eps, at.normed, early=alone)
        gated_linear(at.normed, layer.gate_up, at.product, cuts.gate_up, early=early)
        linear(at.product[0], layer.down, at.down, cuts.down, early=early)
        return at.down if at.exchange is None else at.exchange.sum_parts(at.down)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    # the vendor's library keeps memory for every stream that it was ever used on
    return torch.cuda.Stream(device)


def _upload(target: Tensor, values: Sequence[int]) -> None:
    host = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
    target.copy_(host, non_blocking=True)
