"""Which samples a step uses. Needs no torch.

The order is a pure function of the seed, the step and two sizes, so a run that is resumed, retried
or scheduled otherwise sees the same prompts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from common.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KEY_LIMIT = 1 << 64


def step_samples(
    *, seed: int, step: int, prompts_per_step: int, dataset_rows: int
) -> tuple[int, ...]:
    """Row numbers of a step's prompts, in group order.

    Every pass over the data is a permutation of its own; a step may span the end of a pass.
    Raises: InvalidArgument for a size below 1 or a negative step or seed.
    """
    if dataset_rows < 1 or prompts_per_step < 1 or step < 0 or seed < 0:
        raise InvalidArgument(
            f"step {step} of {prompts_per_step} prompts from {dataset_rows} rows with seed {seed}:"
            " the sizes must be 1 or more, step and seed 0 or more"
        )
    start = step * prompts_per_step
    positions = range(start, start + prompts_per_step)
    return tuple(
        int(_permutation(seed, position // dataset_rows, dataset_rows)[position % dataset_rows])
        for position in positions
    )


@lru_cache(maxsize=4)
def _permutation(seed: int, pass_index: int, rows: int) -> NDArray[np.int64]:
    # Raw words of a counter-based generator are the same in every numpy; its shuffles need not be.
    words = np.random.Philox(key=[seed % _KEY_LIMIT, pass_index]).random_raw(rows)
    return np.argsort(words, kind="stable")
