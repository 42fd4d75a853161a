"""The update: normalise, clip and apply the accumulated gradients to flat master weights.

Everything works in place on flat slices of shared storage, in the order of the weight layout:
parameters with weight decay, then those without. Frozen parameters are not in these slices.
Masters, moments and gradients are float32, or float64 with a float64 model. Nothing is kept
outside the slices: the step count is the weights version, so an optimizer made from saved masters
and moments continues bit for bit, and so do optimizers of ranges of them, one after the other. A
version without an update (no gradient, or one that was not finite) counts too; all it does is to
end the bias correction of the first steps a little sooner.

Shapes: P trainable elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.errors import InvalidArgument
from common.rl.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.rl.config import AlgorithmConfig


NORM_PART = 1 << 26
"""Elements of which the global norm makes a float64 copy at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What becomes of one update."""

    applied: bool
    """False if a gradient was NaN or infinite; masters and moments then stay as they are."""
    gradient_norm: float
    """Global norm after normalisation and before clipping; NaN or infinite if not applied."""
    clipped: bool
    """Whether the gradients were scaled down to the largest legal norm."""
    learning_rate: float


class FlatAdamW:
    """AdamW on at most two flat parameters whose moments lie in storage that is given.

    Cheap to make: it allocates nothing of size P, so every update may make its own. It keeps
    views of the slices, so the storage has to outlive it. It checks no values; `ready_gradients`
    keeps gradients that are not finite away from it.

    Args:
        master_P: [P] float32 or float64; the weights, changed in place.
        moments_2P: [2, P], same dtype; first and second moments, changed in place; zeros at first.
        decay_elements: length of the leading part that has weight decay.
        version: of the weights that `master_P` holds; `step` leads to the next one.
        config: decay, betas and eps; the learning rate is given to each `step`.
    Raises: ShapeError if the slices disagree.
    """

    def __init__(
        self,
        master_P: Tensor,
        moments_2P: Tensor,
        *,
        decay_elements: int,
        version: int,
        config: AlgorithmConfig,
    ) -> None:
        size = master_P.numel()
        if master_P.dim() != 1 or moments_2P.shape != (2, size) or decay_elements > size:
            raise ShapeError(
                f"masters {tuple(master_P.shape)}, moments {tuple(moments_2P.shape)}, "
                f"{decay_elements} with decay: must be [P], [2, P] and at most P"
            )
        self._master_P = master_P
        parts = [
            (slice(0, decay_elements), config.weight_decay),
            (slice(decay_elements, size), 0.0),
        ]
        self._parts = [(part, decay) for part, decay in parts if part.start < part.stop]
        self._parameters = [torch.nn.Parameter(master_P[part]) for part, _ in self._parts]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [parameter], "weight_decay": decay}
                for parameter, (_, decay) in zip(self._parameters, self._parts, strict=True)
            ],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        for parameter, (part, _) in zip(self._parameters, self._parts, strict=True):
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(version), device=master_P.device),
                "exp_avg": moments_2P[0, part],
                "exp_avg_sq": moments_2P[1, part],
            }

    def step(self, gradients_P: Tensor, *, learning_rate: float) -> None:
        """Update masters and moments in place from finite gradients.

        Args:
            gradients_P: [P] of the masters' dtype; only read.
            learning_rate: of this update.
        Raises: ShapeError if the gradients are not [P].
        Sync: none.
        """
        if gradients_P.shape != self._master_P.shape:
            raise ShapeError(
                f"gradients {tuple(gradients_P.shape)}: must be {tuple(self._master_P.shape)}"
            )
        for parameter, group, (part, _) in zip(
            self._parameters, self._optimizer.param_groups, self._parts, strict=True
        ):
            parameter.grad = gradients_P[part]
            group["lr"] = learning_rate
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None


def normalise(gradients_P: Tensor, tokens: int) -> None:
    """Divide accumulated gradients, in place, by the step's number of response tokens.

    Raises: InvalidArgument if there are no tokens.
    """
    if tokens < 1:
        raise InvalidArgument(
            f"response tokens of the step = {tokens}: must be at least 1 for an update"
        )
    gradients_P.div_(tokens)


def global_norm(gradients_P: Tensor) -> float:
    """The norm of all gradients, where one process has them all.

    Memory: a float64 copy of `NORM_PART` elements. Sync: one.
    """
    norms = [
        torch.linalg.vector_norm(part, dtype=torch.float64) for part in gradients_P.split(NORM_PART)
    ]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def clip_by_global_norm(
    gradients_P: Tensor, max_norm: float, *, norm_of: Callable[[Tensor], float] = global_norm
) -> float:
    """Scale gradients down, in place, to a norm of at most `max_norm`.

    Args:
        norm_of: the norm of all gradients, of which `gradients_P` may be one rank's part.
    Returns: the norm before. If it is NaN or infinite, nothing is changed.
    """
    norm = norm_of(gradients_P)
    if math.isfinite(norm) and norm > max_norm:
        gradients_P.mul_(max_norm / norm)
    return norm


def ready_gradients(
    gradients_P: Tensor,
    *,
    tokens: int,
    max_norm: float,
    learning_rate: float,
    norm_of: Callable[[Tensor], float] = global_norm,
) -> UpdateReport:
    """Normalise and clip the accumulated gradients, and tell whether they are to be applied.

    `FlatAdamW.step` applies them, whole or a range after the other.

    Args:
        gradients_P: [P] of the masters' dtype, unnormalised sums; changed in place.
        tokens: response tokens of the step.
        learning_rate: for the report.
        norm_of: as for `clip_by_global_norm`.
    Raises: InvalidArgument if there are no tokens.
    """
    normalise(gradients_P, tokens)
    norm = clip_by_global_norm(gradients_P, max_norm, norm_of=norm_of)
    finite = math.isfinite(norm)
    return UpdateReport(
        applied=finite,
        gradient_norm=norm,
        clipped=finite and norm > max_norm,
        learning_rate=learning_rate,
    )
