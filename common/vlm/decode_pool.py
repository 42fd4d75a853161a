"""Keys and values of the groups that are being decoded, each prefix once.

Shapes: L = layers, B = slots for groups, S = lanes (samples) of a slot, K = key/value heads,
D = head width, Pc = prefix capacity + 1, Rc = response capacity.

Life of a slot: `admit` copies a prefix in → `start_groups` adds the last prompt token, which all
lanes share → `decode_rows` adds one token to each named lane → `release`. The lowest free slot is
taken first, because decoding works on all slots up to the highest one in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from common.vlm.errors import DecodePoolFull, DecodeStateInvalid
from common.vlm.loading import head_dim, text_config

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLConfig

    from common.vlm.prefix import PrefixKV


@dataclass(slots=True, kw_only=True)
class Slot:
    """Host-side state of one admitted group.

    Attributes:
        last_token: id of the last prompt token.
        start_position: its position.
        shared_tokens: tokens in the shared part; the last prompt token is one of them once started.
        started: whether the last prompt token has been processed.
        lane_tokens: tokens in each lane's private part.
    """

    last_token: int
    start_position: int
    shared_tokens: int
    started: bool = False
    lane_tokens: list[int] = field(default_factory=list)


class DecodePool:
    """Preallocated storage for groups in decode. Owned and used by one thread."""

    def __init__(
        self,
        config: Qwen2_5_VLConfig,
        *,
        groups: int,
        samples: int,
        prefix_tokens: int,
        response_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_heads: int | None = None,
    ) -> None:
        """Allocate the pool.

        Args:
            config: gives layers, heads and head width.
            groups: slots.
            samples: lanes of each slot.
            prefix_tokens: longest prefix, the last prompt token not counted.
            response_tokens: most tokens that a lane can be fed.
            dtype, device: of keys and values.
            kv_heads: of a tensor-parallel rank, from `SplitModel.kv_heads`; all if not given.
        """
        text = text_config(config)
        heads = text.num_key_value_heads if kv_heads is None else kv_heads
        width = head_dim(config)
        layers = text.num_hidden_layers
        self.groups, self.samples = groups, samples
        self.prefix_tokens, self.response_tokens = prefix_tokens, response_tokens
        self.shared = torch.zeros(
            (layers, 2, groups, heads, prefix_tokens + 1, width), dtype=dtype, device=device
        )
        """[L, 2, B, K, Pc, D]: one copy for all lanes of a slot."""
        self.private = torch.zeros(
            (layers, 2, groups, samples, heads, response_tokens, width), dtype=dtype, device=device
        )
        """[L, 2, B, S, K, Rc, D]."""
        self._slots: dict[int, Slot] = {}
        self._left_over: dict[int, tuple[int, int]] = {}
        """Tokens in the shared and in the private parts of a free slot that had a tenant."""

    @property
    def nbytes(self) -> int:
        """Device bytes of the pool."""
        return self.shared.nbytes + self.private.nbytes

    @property
    def free_slots(self) -> int:
        """How many groups can still be admitted."""
        return self.groups - len(self._slots)

    def admit(self, prefix: PrefixKV, *, last_token: int, start_position: int) -> int:
        """Copy a prefix into the lowest free slot.

        Args:
            prefix: keys and values, such as views of a lease; not needed afterwards.
            last_token: id of the last prompt token.
            start_position: its position.
        Returns: the slot.
        Raises: DecodePoolFull if no slot is free or the prefix is longer than the capacity.
        """
        free = next((slot for slot in range(self.groups) if slot not in self._slots), None)
        if free is None:
            raise DecodePoolFull(f"all {self.groups} slots of the decode pool are in use")
        if prefix.tokens > self.prefix_tokens:
            raise DecodePoolFull(
                f"a prefix of {prefix.tokens} tokens does not fit slots of {self.prefix_tokens}"
            )
        self._clean(free, prefix.tokens)
        prefix.pack(self.shared[:, :, free, :, : prefix.tokens])
        self._slots[free] = Slot(
            last_token=last_token,
            start_position=start_position,
            shared_tokens=prefix.tokens,
            lane_tokens=[0] * self.samples,
        )
        return free

    def release(self, slot: int) -> None:
        """Free a slot for another group.

        Raises: DecodeStateInvalid if it is free already.
        """
        state = self.slot(slot)
        del self._slots[slot]
        self._left_over[slot] = (state.shared_tokens, max(state.lane_tokens, default=0))

    def grow(self, prefix_tokens: int) -> None:
        """Make room for prefixes of at least this length; what the slots hold stays.

        Takes the memory of the new shared part beside the old one while it copies.
        """
        more = prefix_tokens - self.prefix_tokens
        if more > 0:
            self.shared = torch.nn.functional.pad(self.shared, (0, 0, 0, more))
            self.prefix_tokens = prefix_tokens

    def slot(self, slot: int) -> Slot:
        """State of a slot in use.

        Raises: DecodeStateInvalid if it is free.
        """
        state = self._slots.get(slot)
        if state is None:
            raise DecodeStateInvalid(f"slot {slot} holds no group", slot=slot)
        return state

    def _clean(self, slot: int, prefix_tokens: int) -> None:
        """Zero what the last tenant left where the next one will not overwrite it at once.

        It is masked: a key's score is replaced, but a value is multiplied by a weight of 0, which
        a NaN or an infinity survives. So values have to go, and nothing else.
        """
        shared_tokens, private_tokens = self._left_over.pop(slot, (0, 0))
        self.shared[:, 1, slot, :, prefix_tokens:shared_tokens].zero_()
        self.private[:, 1, slot, :, :, :private_tokens].zero_()
