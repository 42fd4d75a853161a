"""Decoding on CUDA: one graph of fused kernels for each number of rows, all state on the device.

Shapes: R = rows of a graph, B = slots, S = lanes of a slot, L = layers, h = hidden width,
H = query heads, K = key/value heads, D = head width, C = vocabulary, N = most new tokens.

A lane is fed the last prompt token first, so its private part holds as many tokens as it
generates. Between changes of the set of rows a step needs nothing from the host; what a step
chose is copied to the host behind it, to be read while the next step runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.vlm.cuda.decode_attention import Blocks, Scratch, attend, plan_items
from common.vlm.cuda.decode_linear import Tiles, gated_linear, linear, splits
from common.vlm.cuda.decode_rows import embed, split_heads, sum_norm
from common.vlm.cuda.decode_sampling import Choice, ChunkFacts, Lanes, choose
from common.vlm.cuda.gradients import adjacent
from common.vlm.errors import DecodePoolFull, DecodeStateInvalid
from common.vlm.loading import head_dim, text_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.vlm.decode_pool import DecodePool
    from common.vlm.model import SplitModel

UNUSED = -1
"""The lane of a row, or the row of a lane, that is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """How the step's kernels are cut; a matter of speed only.

    Attributes:
        qkv, out, gate_up, down, head: tiles of the products; None for the vendor's library.
        attention: blocks of the attention kernels.
        items: pieces that all prefixes together are cut into.
    """

    qkv: Tiles | None = field(default_factory=lambda: Tiles(columns=64, inner=128, splits=4))
    out: Tiles | None = field(default_factory=lambda: Tiles(columns=64, inner=128, splits=4))
    gate_up: Tiles | None = field(default_factory=lambda: Tiles(columns=32, inner=128))
    down: Tiles | None = field(default_factory=lambda: Tiles(columns=64, inner=128, splits=8))
    head: Tiles | None = field(default_factory=lambda: Tiles(columns=128, inner=128))
    attention: Blocks = field(default_factory=Blocks)
    items: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Views of one layer's weights; each product's weight is one tensor.

    Attributes:
        qkv: [(H + 2 K) * D, h]; qkv_bias: [(H + 2 K) * D].
        out: [h, H * D].
        gate_up: [2 i, h]; down: [h, i].
        first_norm, second_norm: [h].
    """

    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    first_norm: Tensor
    second_norm: Tensor
    eps: float

    @classmethod
    def of(cls, layer: Any) -> LayerWeights:
        """The weights of a decoder layer.

        Raises: DecodeStateInvalid if its parameters do not lie side by side in flat storage.
        """
        attention, mlp = layer.self_attn, layer.mlp
        heads = (attention.q_proj, attention.k_proj, attention.v_proj)
        return cls(
            qkv=_joined([p.weight for p in heads]),
            qkv_bias=_joined([p.bias for p in heads]),
            out=attention.o_proj.weight.detach(),
            gate_up=_joined([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=mlp.down_proj.weight.detach(),
            first_norm=layer.input_layernorm.weight.detach(),
            second_norm=layer.post_attention_layernorm.weight.detach(),
            eps=layer.input_layernorm.variance_epsilon,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Activations of one number of rows.

    Attributes:
        row_lane: [R] int32.
        hidden, normed: [R, h].
        qkv, added: parts of products, float32.
        query, attended: [R, H, D].
        product: [1, R, i].
        logits: [1, R, C].
    """

    row_lane: Tensor
    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    query: Tensor
    attended: Tensor
    out: Tensor
    product: Tensor
    down: Tensor
    logits: Tensor
    facts: ChunkFacts


@dataclass(slots=True, kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    buffers: Buffers


@dataclass(slots=True, kw_only=True)
class Chosen:
    """What one step chose, on its way to the host.

    Attributes:
        lanes: (slot, lane) of each row.
        state: [3, B * S] int32 pinned: next token, tokens, finished of every lane.
        ready: recorded behind the copy; None where copies are not asynchronous.
    """

    lanes: tuple[tuple[int, int], ...]
    state: Tensor
    ready: torch.cuda.Event | None

    def finished(self, samples: int) -> list[tuple[int, int]]:
        """The rows' lanes that have ended; waits for the step.

        Args:
            samples: S of the pool.
        """
        if self.ready is not None:
            self.ready.synchronize()
        over = self.state[2].tolist()
        return [(slot, lane) for slot, lane in self.lanes if over[slot * samples + lane]]


@dataclass(slots=True)
class CudaDecoder:
    """Steps the lanes of a pool; owned and used by one thread.

    Attributes:
        model: the policy, bound to flat storage; its weights are read in place.
        pool: `response_tokens` of it must be as many as a lane may generate.
        choice: how tokens are chosen.
        cuts: how kernels are cut.
        positions: rows of the tables of angles; no position may be past them.
    """

    model: SplitModel
    pool: DecodePool
    choice: Choice
    cuts: Cuts = field(default_factory=Cuts)
    positions: int = 32768
    lanes: Lanes = field(init=False)
    _layers: list[LayerWeights] = field(init=False)
    _captured: dict[tuple[int, int], _Captured] = field(init=False, default_factory=dict)
    _eager: dict[int, Buffers] = field(init=False, default_factory=dict)
    _index: Tensor = field(init=False)
    _rows: tuple[tuple[int, int], ...] = field(init=False, default=())
    _scratch: Scratch = field(init=False)
    _angles: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        language, pool = self.model.language, self.pool
        device = pool.shared.device
        self._layers = [LayerWeights.of(layer) for layer in language.layers]
        total = pool.groups * pool.samples
        self.lanes = Lanes.make(lanes=total, new_tokens=pool.response_tokens, device=device)
        text = text_config(self.model.config)
        self._scratch = Scratch.make(
            items=self.cuts.items,
            kv_heads=text.num_key_value_heads,
            rows=pool.samples * (text.num_attention_heads // text.num_key_value_heads),
            width=head_dim(self.model.config),
            device=device,
        )
        # row of each lane, then the items, then the slots' ranges of items: one upload
        self._index = torch.full(
            (total + 3 * self.cuts.items + 2 * pool.groups,),
            UNUSED,
            dtype=torch.int32,
            device=device,
        )
        place = torch.arange(self.positions, device=device)
        sample = torch.empty((1, 1, 1), dtype=self.model.dtype, device=device)
        cos, sin = language.rotary_emb(sample, place.expand(3, 1, -1))
        self._angles = (cos[0].contiguous(), sin[0].contiguous())

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
        wanted = torch.tensor(list(limits), dtype=torch.int32)
        self.choice.limits[part] = wanted.to(self.choice.limits.device)

    def set_rows(self, rows: Sequence[tuple[int, int]], *, bucket: int) -> None:
        """Choose the lanes that the next steps advance.

        Args:
            rows: (slot, lane), each once, at most `bucket`.
            bucket: R of the steps.
        Raises: DecodeStateInvalid for too many rows, or more slots than prefix items.
        """
        pool = self.pool
        used = sorted({slot for slot, _ in rows})
        if len(rows) > bucket or len(set(rows)) != len(rows) or len(used) > self.cuts.items:
            raise DecodeStateInvalid(
                f"{len(rows)} rows of {len(used)} slots do not fit {bucket} rows and "
                f"{self.cuts.items} items, or a row is named twice"
            )
        lane_row = [UNUSED] * (pool.groups * pool.samples)
        flat = [slot * pool.samples + lane for slot, lane in rows]
        for row, lane in enumerate(flat):
            lane_row[lane] = row
        items, ranges = plan_items(
            [(slot, pool.slot(slot).shared_tokens) for slot in used],
            slots=pool.groups,
            items=self.cuts.items,
            block=self.cuts.attention.prefix_keys,
        )
        self._upload(self._index, lane_row + items + ranges)
        self._upload(self._buffers(bucket).row_lane, flat + [UNUSED] * (bucket - len(flat)))
        self._rows = tuple(rows)

    def capture(self, bucket: int, *, share: int = 0, stream: Any = None) -> None:
        """Record the graph of R rows; a graph keeps the multiprocessors of its stream.

        Args:
            bucket: R.
            share: names the stream's share; `step` replays the graph of the same one.
            stream: to record on; the current one if not given.
        """
        buffers = self._buffers(bucket)
        side = stream or torch.cuda.Stream()
        kept = self._rows
        self._upload(buffers.row_lane, [UNUSED] * bucket)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            self._run(buffers)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                self._run(buffers)
        torch.cuda.current_stream().wait_stream(side)
        self._captured[bucket, share] = _Captured(graph=graph, buffers=buffers)
        if kept:
            self.set_rows(kept, bucket=bucket)

    @torch.no_grad()
    def step(self, bucket: int, *, share: int = 0) -> Chosen:
        """Advance the rows of `set_rows` by one token, on the current stream.

        Without a captured graph the kernels are launched one by one.

        Args:
            bucket: R, the same as in `set_rows`.
            share: of the graph.
        """
        captured = self._captured.get((bucket, share))
        if captured is None:
            self._run(self._buffers(bucket))
        else:
            captured.graph.replay()
        source = self.lanes.state
        if not source.is_cuda:
            return Chosen(lanes=self._rows, state=source.clone(), ready=None)
        state = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        state.copy_(source, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Chosen(lanes=self._rows, state=state, ready=ready)

    def _upload(self, target: Tensor, values: Sequence[int]) -> None:
        host = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
        target.copy_(host, non_blocking=True)

    def _buffers(self, bucket: int) -> Buffers:
        if bucket not in self._eager:
            self._eager[bucket] = self._make_buffers(bucket)
        return self._eager[bucket]

    def _make_buffers(self, rows: int) -> Buffers:
        text = text_config(self.model.config)
        first, cuts = self._layers[0], self.cuts
        device, dtype = self.pool.shared.device, self.model.dtype
        width, heads = text.hidden_size, text.num_attention_heads
        vocabulary = self.model.head.weight.shape[0]

        def make(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        precise = torch.float32
        return Buffers(
            row_lane=torch.full((rows,), UNUSED, dtype=torch.int32, device=device),
            hidden=make(rows, width),
            normed=make(rows, width),
            qkv=make(splits(cuts.qkv), rows, first.qkv.shape[0], kind=precise),
            query=make(rows, heads, head_dim(self.model.config)),
            attended=make(rows, heads, head_dim(self.model.config)),
            out=make(splits(cuts.out), rows, width, kind=precise),
            product=make(1, rows, first.down.shape[1]),
            down=make(splits(cuts.down), rows, width, kind=precise),
            logits=make(1, rows, vocabulary),
            facts=ChunkFacts.make(rows=rows, vocabulary=vocabulary, device=device),
        )

    def _run(self, at: Buffers) -> None:
        """One step's kernels, all of fixed addresses."""
        pool, cuts, language = self.pool, self.cuts, self.model.language
        total = pool.groups * pool.samples
        lane_row = self._index[:total]
        items = self._index[total : total + 3 * cuts.items]
        ranges = self._index[total + 3 * cuts.items :]
        embed(language.embed_tokens.weight.detach(), at.row_lane, self.lanes.token, at.hidden)
        added: Tensor | None = None
        for number, layer in enumerate(self._layers):
            sum_norm(at.hidden, added, layer.first_norm, layer.eps, at.normed)
            linear(at.normed, layer.qkv, at.qkv, cuts.qkv)
            split_heads(
                at.qkv,
                layer.qkv_bias,
                at.query,
                pool.private[number],
                row_lane=at.row_lane,
                lane_tokens=self.lanes.tokens,
                lane_position=self.lanes.position,
                cosines=self._angles[0],
                sines=self._angles[1],
            )
            attend(
                at.query,
                pool.shared[number],
                pool.private[number],
                at.attended,
                row_lane=at.row_lane,
                lane_row=lane_row,
                lane_tokens=self.lanes.tokens,
                items=items,
                ranges=ranges,
                scratch=self._scratch,
                blocks=cuts.attention,
            )
            linear(at.attended.flatten(1), layer.out, at.out, cuts.out)
            sum_norm(at.hidden, at.out, layer.second_norm, layer.eps, at.normed)
            gated_linear(at.normed, layer.gate_up, at.product, cuts.gate_up)
            linear(at.product[0], layer.down, at.down, cuts.down)
            added = at.down
        norm = language.norm
        sum_norm(at.hidden, added, norm.weight.detach(), norm.variance_epsilon, at.normed)
        linear(at.normed, self.model.head.weight.detach(), at.logits, cuts.head)
        choose(at.logits[0], at.row_lane, self.lanes, self.choice, at.facts)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    view = adjacent(tensors)
    if view is None:
        raise DecodeStateInvalid("a layer's projections do not lie side by side in flat storage")
    return view
