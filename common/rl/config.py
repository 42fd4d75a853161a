"""The `[algorithm]` table of a recipe. Imports without torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from common.config.base import FrozenConfig

_KL_PLACEMENT = {"k1": "reward", "k2": "loss", "k3": "loss"}


class AlgorithmConfig(FrozenConfig):
    """What is optimised, and how."""

    name: Literal["grpo"] = "grpo"
    """The algorithm: GRPO, with advantages from the rewards inside each group."""
    scale_by_std: bool = True
    """Divide a group's centred rewards by their standard deviation."""

    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL term; 0 needs no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 may be used in the reward only, k2 and k3 in the loss only."""
    kl_placement: Literal["reward", "loss"] = "loss"
    """Where the KL term enters; unset, it follows from the estimator."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Probability ratios below 1 - clip_low give no further gradient."""
    clip_high: float = Field(default=0.2, gt=0)
    """Probability ratios above 1 + clip_high give no further gradient."""

    learning_rate: float = Field(default=1e-6, ge=0)
    """Highest learning rate of the schedule."""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly to its highest."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the highest learning rate at which the cosine ends."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of AdamW's second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; norms and biases have none."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm above which gradients are scaled down."""
    nonfinite_limit: int = Field(default=3, ge=1)
    """Consecutive steps skipped for NaN or infinite gradients that stop the run."""

    @property
    def needs_reference(self) -> bool:
        """Whether responses are scored by the reference model."""
        return self.kl_coefficient > 0

    @model_validator(mode="before")
    @classmethod
    def _place_kl(cls, values: Any) -> Any:
        if isinstance(values, dict) and "kl_placement" not in values:
            placement = _KL_PLACEMENT.get(values.get("kl_estimator", "k3"))
            if placement is not None:
                return {**values, "kl_placement": placement}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        legal = _KL_PLACEMENT[self.kl_estimator]
        if self.kl_placement != legal:
            raise ValueError(
                f"kl_placement = {self.kl_placement!r} with kl_estimator = {self.kl_estimator!r}: "
                f"{self.kl_estimator} may be used in the {legal} only"
            )
        for index, beta in enumerate(self.betas, start=1):
            if not 0 <= beta < 1:
                raise ValueError(f"betas: beta {index} = {beta} must be in [0, 1)")
        return self
