"""One decode step for many samples of many groups, each prefix read once a group.

Shapes: R = rows (one token each), A = slots up to the highest one used, S = lanes, C = vocabulary,
H = query heads, K = key/value heads, Q = H / K, D = head width, h = hidden width,
Pw and Tw = widest shared and private part among the rows.

Projections and MLPs run on the R rows. For attention the queries are spread over [A, S] lanes, so
that all lanes of a slot meet the slot's one copy of the prefix in a single matrix product, and
each lane its own tokens; one softmax spans both. A row's result is a function of the set of rows
in the call and of the pool's contents, never of time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.vlm import layers
from common.vlm.errors import DecodePoolFull, DecodeStateInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.vlm.decode_pool import DecodePool
    from common.vlm.model import SplitModel


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Where the rows of one call read and write.

    Attributes:
        slots: [R] int64.
        lanes: [R] int64; all 0 if the step has no private part.
        write: [R] int64, index of the new token in its part.
        lane_count: S, or 1 if the step has no private part.
        slot_count: A.
        shared_mask: [A, 1, 1, 1, Pw] bool, True where a key may not be seen.
        private_mask: [A, S, 1, 1, Tw] bool, likewise.
    """

    slots: Tensor
    lanes: Tensor
    write: Tensor
    lane_count: int
    slot_count: int
    shared_mask: Tensor
    private_mask: Tensor


@torch.no_grad()
def start_groups(model: SplitModel, pool: DecodePool, slots: Sequence[int]) -> Tensor:
    """Process the last prompt token of each group, once for all its samples.

    Args:
        model: the policy.
        pool: its K/V; the new token's is added to the shared part.
        slots: at least one; admitted, not started, each once.
    Returns: [len(slots), C] logits of the first response token, in the model's dtype.
    Raises: DecodeStateInvalid for a slot that is free, started or named twice.
    """
    states = [pool.slot(slot) for slot in slots]
    for slot, state in zip(slots, states, strict=True):
        if state.started:
            raise DecodeStateInvalid(f"slot {slot} has been started already", slot=slot)
    _require_distinct(list(slots), "slot")
    step = _step(pool, slots, None, [state.shared_tokens for state in states])
    tokens = torch.tensor([state.last_token for state in states], device=model.device)
    logits = _advance(model, pool, step, tokens, [state.start_position for state in states])
    for state in states:
        state.shared_tokens += 1
        state.started = True
    return logits


@torch.no_grad()
def decode_rows(
    model: SplitModel,
    pool: DecodePool,
    slots: Sequence[int],
    samples: Sequence[int],
    tokens: Tensor,
) -> Tensor:
    """Feed one token to each of several samples and return the logits of their next.

    Args:
        model: the policy.
        pool: its K/V; the new tokens' are added to the private parts.
        slots: [R] slot of each row, at least one.
        samples: [R] lane of each row; a (slot, lane) at most once.
        tokens: [R] int64, what was sampled last for each row.
    Returns: [R, C] logits in the model's dtype, nothing suppressed.
    Raises: DecodeStateInvalid for a slot that is not started or a row named twice;
        DecodePoolFull if a lane has no room left.
    """
    states = [pool.slot(slot) for slot in slots]
    _require_distinct(list(zip(slots, samples, strict=True)), "row")
    fed: list[int] = []
    for slot, lane, state in zip(slots, samples, states, strict=True):
        if not state.started or not 0 <= lane < pool.samples:
            raise DecodeStateInvalid(f"slot {slot} lane {lane} cannot decode yet", slot=slot)
        if state.lane_tokens[lane] >= pool.response_tokens:
            raise DecodePoolFull(
                f"slot {slot} lane {lane} already holds its {pool.response_tokens} tokens"
            )
        fed.append(state.lane_tokens[lane])
    step = _step(pool, slots, samples, fed)
    positions = [s.start_position + 1 + count for s, count in zip(states, fed, strict=True)]
    logits = _advance(model, pool, step, tokens, positions)
    for lane, state in zip(samples, states, strict=True):
        state.lane_tokens[lane] += 1
    return logits


def _step(
    pool: DecodePool, slots: Sequence[int], samples: Sequence[int] | None, write: Sequence[int]
) -> _Step:
    """Index tensors of a call; without `samples`, rows go to the shared part."""
    device = pool.shared.device
    slot_count = max(slots) + 1
    lane_count = 1 if samples is None else pool.samples
    lanes = torch.tensor([0] * len(slots) if samples is None else samples, device=device)
    slots_R, write_R = torch.tensor(slots, device=device), torch.tensor(write, device=device)
    # a lane without a row keeps one visible key, so that its unused softmax is finite
    shared = torch.ones(slot_count, dtype=torch.int64, device=device)
    private = torch.zeros((slot_count, lane_count), dtype=torch.int64, device=device)
    if samples is None:
        shared_width, private_width = max(write) + 1, 0
        shared[slots_R] = write_R + 1
    else:
        counts = [pool.slot(slot).shared_tokens for slot in slots]
        shared_width, private_width = max(counts), max(write) + 1
        shared[slots_R] = torch.tensor(counts, device=device)
        private[slots_R, lanes] = write_R + 1
    shared_index = torch.arange(shared_width, device=device)
    private_index = torch.arange(private_width, device=device)
    return _Step(
        slots=slots_R,
        lanes=lanes,
        write=write_R,
        lane_count=lane_count,
        slot_count=slot_count,
        shared_mask=shared_index >= shared[:, None, None, None, None],
        private_mask=private_index >= private[:, :, None, None, None],
    )


def _advance(
    model: SplitModel, pool: DecodePool, step: _Step, tokens: Tensor, positions: Sequence[int]
) -> Tensor:
    """[R, C]: logits after `tokens` [R] at `positions` [R]; their K/V are written to the pool."""
    hidden = model.language.embed_tokens(tokens)
    positions_3R = torch.tensor(positions, device=hidden.device).expand(3, -1)
    angles = layers.rotary(model.language, hidden, positions_3R)
    for number, layer in enumerate(model.language.layers):
        normed = layer.input_layernorm(hidden)
        key, value = layers.key_value(layer, normed, angles)
        query = layers.queries(layer, normed, angles)
        _write(pool, step, number, key, value)
        attended = _attend(pool, step, number, query)
        hidden = layers.finish(layer, hidden, attended)
    return model.logits(model.language.norm(hidden))


def _write(pool: DecodePool, step: _Step, layer: int, key: Tensor, value: Tensor) -> None:
    for part, states in enumerate((key, value)):
        rows = states.transpose(0, 1)
        if step.private_mask.shape[-1] == 0:
            pool.shared[layer, part][step.slots, :, step.write] = rows
        else:
            pool.private[layer, part][step.slots, step.lanes, :, step.write] = rows


def _attend(pool: DecodePool, step: _Step, layer: int, query: Tensor) -> Tensor:
    """Attention [H, R, D] of queries [H, R, D] over their slot's prefix and their lane's tokens."""
    heads, rows, width = query.shape
    slots, lanes = step.slot_count, step.lane_count
    shared_width, private_width = step.shared_mask.shape[-1], step.private_mask.shape[-1]
    shared_key, shared_value = pool.shared[layer, :, :slots, :, :, :][..., :shared_width, :]
    private_key, private_value = pool.private[layer, :, :slots, :lanes][..., :private_width, :]
    kv_heads = shared_key.shape[1]
    per_kv = heads // kv_heads

    by_row = query.view(kv_heads, per_kv, rows, width).permute(2, 0, 1, 3) * width**-0.5
    spread = query.new_zeros((slots, lanes, kv_heads, per_kv, width))
    spread[step.slots, step.lanes] = by_row
    # [A, K, S * Q, D]: every lane of a slot against the slot's one copy of the prefix
    by_slot = spread.transpose(1, 2).reshape(slots, kv_heads, lanes * per_kv, width)
    shared_scores = (
        (by_slot @ shared_key.transpose(-1, -2))
        .view(slots, kv_heads, lanes, per_kv, shared_width)
        .transpose(1, 2)
        .masked_fill(step.shared_mask, float("-inf"))
    )
    private_scores = (spread @ private_key.transpose(-1, -2)).masked_fill(
        step.private_mask, float("-inf")
    )
    scores = torch.cat((shared_scores, private_scores), dim=-1)
    precise = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = scores.softmax(dim=-1, dtype=precise).to(query.dtype)
    on_prefix, on_own = weights.split((shared_width, private_width), dim=-1)
    from_prefix = (
        on_prefix.transpose(1, 2).reshape(slots, kv_heads, lanes * per_kv, shared_width)
        @ shared_value
    )
    result = from_prefix.view(slots, kv_heads, lanes, per_kv, width).transpose(1, 2)
    result = result + on_own @ private_value
    return result[step.slots, step.lanes].permute(1, 2, 0, 3).reshape(heads, rows, width)


def _require_distinct(keys: Sequence[object], what: str) -> None:
    if len(set(keys)) != len(keys):
        raise DecodeStateInvalid(f"a {what} is named twice in one call")
