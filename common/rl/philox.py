"""Counter-based randomness: Philox4x32-10 as elementwise tensor arithmetic.

A draw is a function of (run seed, step, group, sample, position) and of nothing else, so it does
not depend on the order, the batch or the process in which a token is sampled. All operations are
elementwise on int64 tensors, without synchronisation, so they run on any device and inside a
captured CUDA graph.

Shapes: N draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox4x32(counter_4N: Tensor, key: tuple[int, int]) -> Tensor:
    """Encrypt counters by ten rounds of Philox4x32.

    Args:
        counter_4N: [4, N] int64, every value a 32-bit word.
        key: two 32-bit words.
    Returns: [4, N] int64 of 32-bit words, same device.
    """
    word0_N, word1_N, word2_N, word3_N = counter_4N.unbind(0)
    key0, key1 = key
    for _ in range(_ROUNDS):
        # A 64-bit product wraps into the sign bit; masking after the shift restores its bits.
        product0_N = word0_N * _MULTIPLIERS[0]
        product1_N = word2_N * _MULTIPLIERS[1]
        word0_N = ((product1_N >> 32) & _MASK) ^ word1_N ^ key0
        word1_N = product1_N & _MASK
        word2_N = ((product0_N >> 32) & _MASK) ^ word3_N ^ key1
        word3_N = product0_N & _MASK
        key0 = (key0 + _KEY_INCREMENTS[0]) & _MASK
        key1 = (key1 + _KEY_INCREMENTS[1]) & _MASK
    return torch.stack((word0_N, word1_N, word2_N, word3_N))


def uniforms(seed: int, step: int, group_N: Tensor, sample_N: Tensor, position_N: Tensor) -> Tensor:
    """Draw one uniform number for every (group, sample, position).

    Args:
        seed: the run's seed; its lowest 64 bits are the key.
        step: index of the training step, below 2**32.
        group_N: [N] int64 (or any shape that broadcasts with the others).
        sample_N: [N] int64; index of the response in its group.
        position_N: [N] int64; index of the token in its response.
    Returns: [N] float64 in [0, 1) with 53 random bits, same device; fresh storage.
    Sync: none.
    """
    group_N, sample_N, position_N = torch.broadcast_tensors(group_N, sample_N, position_N)
    shape = group_N.shape
    words = (torch.full_like(group_N, step), group_N, sample_N, position_N)
    counter_4N = torch.stack([word.reshape(-1) for word in words]) & _MASK
    word_4N = philox4x32(counter_4N, (seed & _MASK, (seed >> 32) & _MASK))
    bits_N = ((word_4N[0] >> 5) << 26) | (word_4N[1] >> 6)
    return (bits_N.to(torch.float64) * 2.0**-53).reshape(shape)
