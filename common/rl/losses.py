"""The clipped policy loss of a group's packed responses, as an unnormalised sum.

The normalizer (all response tokens of the step) is not known while groups still decode, so the
loss and all metrics here are sums over tokens; the update divides once. Sums also make the
gradient independent of how a step is split into backward passes.

Shapes: T tokens of a packed row of responses, G responses.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from common.rl.errors import NonFiniteValue, ShapeError
from common.rl.kl import KlEstimator, kl_per_token
from common.rl.packing import check_lengths, spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from common.rl.config import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResponses:
    """What the loss of one group, or of a part of it, is computed from; all on one device."""

    logprobs: Tensor
    """[T] floating point, with the policy's graph."""
    lengths: Tensor
    """[G] int64; they sum to T, and 0 is legal."""
    advantages: Tensor
    """[G] floating point, finite."""
    old_logprobs: Tensor | None = None
    """[T] under the weights that sampled; None: the present ones detached, so each ratio is 1."""
    reference_logprobs: Tensor | None = None
    """[T] under the reference; None only if the KL coefficient is 0."""
    engine_logprobs: Tensor | None = None
    """[T] as the engine recorded them; None: the mismatch is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums over tokens, and maxima; `merge` joins those of several groups."""

    tokens: float = 0.0
    """All response tokens, those of groups without a gradient too, whose loss is 0."""
    measured_tokens: float = 0.0
    """Tokens that went through the loss: those behind every other sum."""
    loss: float = 0.0
    """The unnormalised loss."""
    kl: float = 0.0
    """Estimates of KL(policy || reference), by the algorithm's estimator."""
    entropy: float = 0.0
    """-log-probability of the sampled tokens: the one-sample estimate of the entropy."""
    ratio: float = 0.0
    """Probability ratios of the present policy to the old one."""
    ratio_deviation_max: float = 0.0
    """Largest |ratio - 1|."""
    clipped_low: float = 0.0
    """Tokens whose ratio is below the clip range and whose gradient is therefore 0."""
    clipped_high: float = 0.0
    """Tokens whose ratio is above the clip range and whose gradient is therefore 0."""
    mismatch_tokens: float = 0.0
    """Tokens for which the engine's log-probability is known."""
    mismatch_k3: float = 0.0
    """k3 estimates of KL(engine || trainer at the weights that sampled)."""
    mismatch_abs_max: float = 0.0
    """Largest |log-probability of the engine - of the trainer|."""

    @classmethod
    def merge(cls, parts: Iterable[LossSums]) -> Self:
        """Join the sums of several groups, in the order given."""
        total = dict.fromkeys(_FIELDS, 0.0)
        for part in parts:
            for name in _FIELDS:
                value = getattr(part, name)
                total[name] = max(total[name], value) if name in _MAXIMA else total[name] + value
        return cls(**total)

    def as_dict(self) -> dict[str, float]:
        """All fields by name, for an event."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> Self:
        """Read what `as_dict` gave; other keys are ignored."""
        return cls(**{name: values[name] for name in _FIELDS})

    def means(self) -> dict[str, float]:
        """Metrics of the step: means over the tokens that were measured, and the maxima.

        The loss is a mean over all tokens, as the update's normalizer is. Where nothing was
        measured, `measured_share` is 0 and the others have the values of an idle step.
        """
        measured = max(self.measured_tokens, 1.0)
        return {
            "loss": self.loss / max(self.tokens, 1.0),
            "measured_share": self.measured_tokens / max(self.tokens, 1.0),
            "kl": self.kl / measured,
            "entropy": self.entropy / measured,
            "ratio_mean": self.ratio / measured if self.measured_tokens else 1.0,
            "ratio_deviation_max": self.ratio_deviation_max,
            "clip_low_share": self.clipped_low / measured,
            "clip_high_share": self.clipped_high / measured,
            "mismatch_k3": self.mismatch_k3 / max(self.mismatch_tokens, 1.0),
            "mismatch_abs_max": self.mismatch_abs_max,
        }


_FIELDS = tuple(field.name for field in dataclasses.fields(LossSums))
_MAXIMA = frozenset({"ratio_deviation_max", "mismatch_abs_max"})


def policy_loss(batch: ScoredResponses, config: AlgorithmConfig) -> tuple[Tensor, LossSums]:
    """Sum over tokens of the clipped policy loss and, where it belongs there, the KL term.

    Returns:
        loss: [] of the dtype of `logprobs`, with its graph; 0 if there are no tokens.
        sums: metrics as floats. NaN or infinity in `logprobs` reaches them and the gradient,
            where the update refuses it.
    Raises: ShapeError if the inputs disagree; NonFiniteValue if an advantage is not finite.
    Sync: one, for the metrics, and the checks of the lengths and the advantages.
    """
    _check(batch, config)
    logprobs_T = batch.logprobs
    advantages_T = spread(batch.advantages.to(logprobs_T.dtype), batch.lengths)
    old_T = logprobs_T if batch.old_logprobs is None else batch.old_logprobs
    old_T = old_T.detach().to(logprobs_T.dtype)
    ratio_T = torch.exp(logprobs_T - old_T)
    clipped_ratio_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_T = -torch.minimum(ratio_T * advantages_T, clipped_ratio_T * advantages_T)
    kl_T = None
    if batch.reference_logprobs is not None:
        reference_T = batch.reference_logprobs.detach().to(logprobs_T.dtype)
        kl_T = kl_per_token(logprobs_T, reference_T, KlEstimator(config.kl_estimator))
        if config.kl_placement == "loss" and config.kl_coefficient > 0:
            loss_T = loss_T + config.kl_coefficient * kl_T
    with torch.no_grad():
        sums = _sums(batch, config, loss_T, ratio_T, advantages_T, kl_T, old_T)
    return loss_T.sum(), sums


def _sums(
    batch: ScoredResponses,
    config: AlgorithmConfig,
    loss_T: Tensor,
    ratio_T: Tensor,
    advantages_T: Tensor,
    kl_T: Tensor | None,
    old_T: Tensor,
) -> LossSums:
    tokens = float(loss_T.numel())
    if tokens == 0:
        return LossSums()
    values = {
        "loss": loss_T.double().sum(),
        "entropy": -batch.logprobs.double().sum(),
        "ratio": ratio_T.double().sum(),
        "ratio_deviation_max": (ratio_T - 1).abs().amax(),
        "clipped_low": ((advantages_T < 0) & (ratio_T < 1 - config.clip_low)).sum(),
        "clipped_high": ((advantages_T > 0) & (ratio_T > 1 + config.clip_high)).sum(),
    }
    if kl_T is not None:
        values["kl"] = kl_T.double().sum()
    if batch.engine_logprobs is not None:
        engine_T, trainer_T = batch.engine_logprobs.double(), old_T.double()
        values["mismatch_k3"] = kl_per_token(engine_T, trainer_T, KlEstimator.K3).sum()
        values["mismatch_abs_max"] = (engine_T - trainer_T).abs().amax()
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return LossSums(
        tokens=tokens,
        measured_tokens=tokens,
        mismatch_tokens=0.0 if batch.engine_logprobs is None else tokens,
        **dict(zip(values, numbers, strict=True)),
    )


def _check(batch: ScoredResponses, config: AlgorithmConfig) -> None:
    shape = batch.logprobs.shape
    check_lengths(batch.lengths, batch.logprobs.numel())
    if batch.advantages.shape != batch.lengths.shape:
        raise ShapeError(
            f"advantages {tuple(batch.advantages.shape)}, "
            f"lengths {tuple(batch.lengths.shape)}: must be one of each a response"
        )
    for name in ("old_logprobs", "reference_logprobs", "engine_logprobs"):
        other = getattr(batch, name)
        if other is not None and other.shape != shape:
            raise ShapeError(f"{name} {tuple(other.shape)}: must be {tuple(shape)}")
    if config.needs_reference and batch.reference_logprobs is None:
        raise ShapeError(
            f"kl_coefficient = {config.kl_coefficient} needs the reference's log-probabilities"
        )
    if not bool(torch.isfinite(batch.advantages).all()):
        raise NonFiniteValue(f"advantages {batch.advantages.tolist()}: must be finite")
