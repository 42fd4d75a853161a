"""What the ranks of a group exchange in a decode step, in buffers of fixed addresses.

Every rank comes to have all logits, so that every rank chooses the same tokens.

Shapes: R = rows, h = hidden width, s = parts of a product, n = ranks, C = vocabulary, c = C / n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from common.vlm.parallel.group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Sums of hidden states, and all logits, for one number of rows.

    Attributes:
        group: the ranks.
        summed: [1, R, h] float32.
        gathered: [n, R, c].
        logits: [R, C].
    """

    group: RankGroup
    summed: Tensor
    gathered: Tensor
    logits: Tensor

    @classmethod
    def make(cls, group: RankGroup, own_logits: Tensor, *, hidden: int) -> Exchange:
        """Allocate.

        Args:
            group: the ranks.
            own_logits: [R, c], for its shape.
            hidden: h.
        """
        rows, columns = own_logits.shape
        return cls(
            group=group,
            summed=own_logits.new_zeros((1, rows, hidden), dtype=torch.float32),
            gathered=own_logits.new_zeros((group.size, rows, columns)),
            logits=own_logits.new_zeros((rows, group.size * columns)),
        )

    @property
    def nbytes(self) -> int:
        """Device bytes of the buffers."""
        return self.summed.nbytes + self.gathered.nbytes + self.logits.nbytes

    def sum_parts(self, parts: Tensor) -> Tensor:
        """Parts [s, R, h] float32 of this rank's product, summed over parts, then over ranks.

        The first sum makes what crosses the ranks s times smaller. Float32, as a single rank's
        sum of parts is: the result is rounded once, where it is added to the hidden states.

        Returns: [1, R, h] float32; `parts` itself, overwritten, or `summed`.
        """
        if parts.shape[0] > 1:
            parts = torch.sum(parts, dim=0, keepdim=True, out=self.summed)
        return self.group.sum(parts)

    def gather_logits(self, own: Tensor) -> Tensor:
        """[R, C] on every rank, of each rank's [R, c]."""
        self.group.gather(own, self.gathered)
        self.logits.view(own.shape[0], self.group.size, -1).copy_(self.gathered.transpose(0, 1))
        return self.logits
