"""Bytes of one tensor, or of one group's tensors, on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

from common.tensors.parts import in_flight_bytes
from common.vlm.shape import QWEN3, vision_ranks
from common.weights.cuts import cuts
from rollplex.plan.request import DTYPE_BYTES
from rollplex.plan.saved import Kept, tower, tower_inputs
from rollplex.plan.weights import kv_heads_of_rank, rank_elements

if TYPE_CHECKING:
    from common.vlm.shape import ModelShape
    from rollplex.plan.request import PlanRequest

_FLOAT32 = 4

RESERVE_BYTES = 8 << 30
"""CUDA contexts, CUDA graphs and library workspaces of all processes of a GPU: what the broker
leaves out of its budget by default."""

LOGITS_BYTES = 1 << 28
"""Most bytes of logits alive at once in the fused vocabulary kernels."""

OPTIMIZER_PART_MIB = 3072.0
"""Of a part of the optimizer's state, as in a recipe's defaults."""

NORM_PART_BYTES = 8 << 26
"""The update's float64 copy for the global norm, a part of the gradients at a time."""


@dataclass(frozen=True)
class Sizes:
    """What tensors of a request take on one GPU.

    Attributes:
        fused: whether the split pass runs on fused kernels.
    """

    request: PlanRequest
    fused: bool

    @property
    def shape(self) -> ModelShape:
        """Of the model."""
        return self.request.shape

    @property
    def itemsize(self) -> int:
        """Bytes of an element of compute weights, activations and K/V."""
        return DTYPE_BYTES[self.request.dtype]

    @property
    def accumulator_itemsize(self) -> int:
        """Bytes of an element of gradient accumulator, masters and moments."""
        return DTYPE_BYTES[self.request.optimizer_dtype]

    @cached_property
    def kept(self) -> Kept:
        """Saved activations of training's ranks."""
        return Kept(
            shape=self.shape,
            fused=self.fused,
            itemsize=self.itemsize,
            ranks=self.request.train_tp,
            sequence_parallel=self.request.sequence_parallel,
        )

    def weights(self, ranks: int) -> int:
        """Compute weights of one of so many ranks."""
        return rank_elements(self.shape, ranks) * self.itemsize

    @cached_property
    def trainable(self) -> int:
        """Trainable parameters of a training rank."""
        vision = self.request.train_vision
        return rank_elements(self.shape, self.request.train_tp, trainable_vision=vision)

    @cached_property
    def optimizer_elements(self) -> int:
        """Trainable parameters whose masters and moments this GPU has."""
        replicas = self.request.replicas if self.request.shard_optimizer else 1
        return -(-self.trainable // replicas)

    @property
    def accumulator(self) -> int:
        """Gradient accumulator."""
        return self.trainable * self.accumulator_itemsize

    @property
    def masters(self) -> int:
        """Master weights; none where the compute weights have the same dtype."""
        return self.masters_of(self.optimizer_elements)

    @property
    def moments(self) -> int:
        """First and second moments."""
        return self.moments_of(self.optimizer_elements)

    def masters_of(self, elements: int) -> int:
        """Master weights of so many parameters."""
        same = self.request.dtype == self.request.optimizer_dtype
        return 0 if same else elements * self.accumulator_itemsize

    def moments_of(self, elements: int) -> int:
        """Moments of so many parameters."""
        return 2 * elements * self.accumulator_itemsize

    @cached_property
    def optimizer_parts(self) -> tuple[slice, ...]:
        """The parts of the optimizer's state, as ranges of its parameters."""
        return cuts(
            self.optimizer_elements,
            element_bytes=self.masters_of(1) + self.moments_of(1),
            part_mib=OPTIMIZER_PART_MIB,
        )

    @cached_property
    def in_flight_elements(self) -> int:
        """Parameters whose masters and moments are on the GPU at a time while they are spilled."""
        return in_flight_bytes([part.stop - part.start for part in self.optimizer_parts])

    def kv(self, tokens: int, ranks: int, itemsize: int | None = None) -> int:
        """Keys and values of so many tokens in all layers."""
        width = kv_heads_of_rank(self.shape, ranks) * self.shape.head_width
        return 2 * self.shape.layers * width * tokens * (itemsize or self.itemsize)

    @cached_property
    def pool_prefix(self) -> int:
        """The rollout's shared prefixes, last prompt token included."""
        tokens = self.request.batch.prompt_tokens * self.request.decoding_groups
        return self.kv(tokens, self.request.rollout_tp)

    @cached_property
    def pool_private(self) -> int:
        """The rollout's responses."""
        tokens = self.request.batch.lane_tokens * self.request.decoding_groups
        return self.kv(tokens, self.request.rollout_tp)

    @cached_property
    def prefix_kv(self) -> int:
        """One group's prefix K/V as handed on to training or to the reference."""
        return self.kv(self.request.batch.prefix_tokens, self.request.train_tp)

    @cached_property
    def prefix_kv_gradients(self) -> int:
        """One group's gradients of them."""
        tokens = self.request.batch.prefix_tokens
        return self.kv(tokens, self.request.train_tp, self.accumulator_itemsize)

    def graph(self, *, inputs: bool) -> int:
        """What one prefix keeps for its backward; `inputs`: layer inputs only."""
        tokens = self.request.batch.prefix_tokens
        saved = self.kept.prefix_inputs() if inputs else self.kept.prefix()
        whole = 0.0 if inputs else self.kept.padding(tokens)
        return ceil(sum(saved.values()) * tokens + whole)

    @cached_property
    def response(self) -> int:
        """What one row of responses keeps; its layers never run again."""
        return ceil(sum(self.kept.response().values()) * self.request.batch.row_tokens)

    @cached_property
    def patches(self) -> int:
        """Of one group."""
        return self.request.batch.vision_tokens * self.shape.vision.merged_patches

    def vision_graph(self, *, inputs: bool) -> int:
        """What one group's tower keeps for its backward; 0: the tower is frozen."""
        if not self.request.train_vision:
            return 0
        saved = tower_inputs(self.kept) if inputs else tower(self.kept)
        return ceil(sum(saved.values()) * self.patches)

    @cached_property
    def embeddings(self) -> int:
        """One group's vision embeddings, those of inner layers included."""
        kinds = 1 + self.shape.vision.deepstack
        tokens = self.request.batch.vision_tokens
        return tokens * kinds * self.shape.vision.out_width * self.itemsize

    @cached_property
    def pixels(self) -> int:
        """One group's pixel values."""
        return self.patches * self.shape.vision.patch_elements * self.itemsize

    def logits(self, *, backward: bool) -> int:
        """Of one row of responses."""
        tokens, columns = self.request.batch.row_tokens, self._columns(self.request.train_tp)
        if not self.fused:
            copies = self.itemsize + _FLOAT32 * (2 if backward else 1)
            return tokens * columns * copies
        hidden = tokens * self.shape.width * _FLOAT32 if backward else 0
        return min(LOGITS_BYTES, tokens * columns * self.itemsize) + hidden

    def forward_work(self, tokens: int, ranks: int) -> int:
        """What one layer's MLP needs beside what is kept: its peak in a forward."""
        inner = self.shape.inner / ranks * (3 if self.fused else 4)
        return ceil(tokens * self.itemsize * (4 * self.shape.width + inner))

    def backward_work(self, tokens: int) -> int:
        """The same in a backward."""
        inner = 4 * self.shape.inner / self.request.train_tp
        return ceil(tokens * self.itemsize * (4 * self.shape.width + inner))

    def encoder_work(self, *, inputs: bool) -> int:
        """A prefix backward's work, and with `inputs` the tensors of the layer that runs again."""
        tokens = self.request.batch.prefix_tokens
        again = ceil(sum(self.kept.layer().values()) * tokens) if inputs else 0
        return self.backward_work(tokens) + again

    def vision_work(self) -> int:
        """One tower block's MLP on one group's patches."""
        vision = self.shape.vision
        copies = 2 if self.shape.model_type == QWEN3 else 3 if self.fused else 4
        inner = copies * vision.inner / vision_ranks(vision, self.request.train_tp)
        return ceil(self.patches * self.itemsize * (4 * vision.width + inner))

    def decode_work(self) -> int:
        """Logits of one decode step, and their float32 copy."""
        rows = self.request.decoding_groups * self.request.batch.samples
        return rows * self._columns(self.request.rollout_tp) * (self.itemsize + _FLOAT32)

    def prefill_work(self) -> int:
        """The engine's own prefill of one group: a layer's work, and K/V before their slot."""
        tokens, ranks = self.request.batch.prefix_tokens, self.request.rollout_tp
        return self.forward_work(tokens, ranks) + self.kv(tokens, ranks)

    def update_work(self) -> int:
        """The norm's part, and the largest row-parallel matrix while shards are gathered."""
        scratch = self.shape.width * self.shape.inner * self.itemsize
        widest = min(self.request.train_tp, self.request.rollout_tp)
        part = min(NORM_PART_BYTES, 8 * self.trainable)
        return part + (scratch // widest if self.request.gpus > 1 else 0)

    def _columns(self, ranks: int) -> int:
        return self.shape.vocabulary // ranks
