"""Host-side record of one group while it decodes.

Shapes: G responses of the group, T tokens of all of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from services.rollout.engines.errors import GroupRequestInvalid, NonFiniteLogits
from services.rollout.engines.protocol import FinishedGroup, FinishReason

if TYPE_CHECKING:
    from common.ids import GroupId
    from services.rollout.engines.protocol import RecordedResponses, StepSpec


class DecodingGroup:
    """Tokens, log-probabilities and ends of a group's responses."""

    def __init__(
        self,
        group: GroupId,
        slot: int,
        spec: StepSpec,
        recorded: RecordedResponses | None,
        limits: tuple[int, ...] | None = None,
    ) -> None:
        samples = spec.samples_per_group
        self.group = group
        self.slot = slot
        """Where the group's K/V lie."""
        self.started = False
        """Whether the last prompt token was processed."""
        self._spec = spec
        self._stops = frozenset(spec.params.stop_token_ids)
        self._recorded = None if recorded is None else split_recording(recorded, spec)
        self._limits = limits
        self._tokens: list[list[int]] = [[] for _ in range(samples)]
        self._logprobs: list[list[float]] = [[] for _ in range(samples)]
        self.active = list(range(samples))
        """Responses that are not complete, in order."""
        if self._recorded is not None:
            self.active = [sample for sample in self.active if self._recorded[sample]]

    def length(self, sample: int) -> int:
        """Tokens of a response so far, which is the index of its next one."""
        return len(self._tokens[sample])

    def last_token(self, sample: int) -> int:
        """The newest token of a response that has one."""
        return self._tokens[sample][-1]

    def limit(self, sample: int) -> int:
        """Most tokens that a response can come to have."""
        if self._recorded is not None:
            return len(self._recorded[sample])
        return self._spec.params.max_new_tokens if self._limits is None else self._limits[sample]

    @property
    def recorded(self) -> list[list[int]] | None:
        """The tokens that each forced response takes."""
        return self._recorded

    def recorded_token(self, sample: int) -> int:
        """The token that a forced response takes next."""
        assert self._recorded is not None
        return self._recorded[sample][len(self._tokens[sample])]

    def append(self, sample: int, token: int, logprob: float) -> None:
        """Add a token to a response and note whether that completes it."""
        tokens = self._tokens[sample]
        tokens.append(token)
        self._logprobs[sample].append(logprob)
        if self._recorded is not None:
            complete = len(tokens) == len(self._recorded[sample])
        else:
            complete = token in self._stops or len(tokens) == self.limit(sample)
        if complete:
            self.active.remove(sample)

    def finish(self, decode_iteration: int) -> FinishedGroup:
        """The complete responses, packed.

        Raises: NonFiniteLogits if a log-probability is not finite.
        """
        self._check_finite()
        reasons = [
            FinishReason.STOP if tokens and tokens[-1] in self._stops else FinishReason.LENGTH
            for tokens in self._tokens
        ]
        return FinishedGroup(
            group=self.group,
            tokens=torch.tensor([t for row in self._tokens for t in row], dtype=torch.int64),
            lengths=torch.tensor([len(row) for row in self._tokens], dtype=torch.int64),
            logprobs=torch.tensor([p for row in self._logprobs for p in row], dtype=torch.float32),
            finish_reasons=torch.tensor(reasons, dtype=torch.uint8),
            decode_iteration=decode_iteration,
            weights_version=self._spec.weights_version,
        )

    def _check_finite(self) -> None:
        for sample, logprobs in enumerate(self._logprobs):
            for position, logprob in enumerate(logprobs):
                if not math.isfinite(logprob):
                    raise NonFiniteLogits(
                        f"log-probability of token {position} of response {sample} of group "
                        f"{self.group} is {logprob} at weights version "
                        f"{self._spec.weights_version}: must be finite",
                        group=int(self.group),
                        sample=sample,
                        position=position,
                        weights_version=int(self._spec.weights_version),
                    )


def split_recording(recorded: RecordedResponses, spec: StepSpec) -> list[list[int]]:
    """Recorded tokens of each response.

    Raises: GroupRequestInvalid if the recording does not fit the step.
    """
    lengths = recorded.lengths.tolist()
    longest = spec.params.max_new_tokens
    if len(lengths) != spec.samples_per_group or sum(lengths) != recorded.tokens.numel():
        raise GroupRequestInvalid(
            f"recording of {len(lengths)} responses, lengths {lengths}, "
            f"{recorded.tokens.numel()} tokens: must be {spec.samples_per_group} responses whose "
            "lengths sum to the tokens"
        )
    if not all(0 <= length <= longest for length in lengths):
        raise GroupRequestInvalid(
            f"recording with lengths {lengths}: none may exceed max_new_tokens = {longest}"
        )
    return [part.tolist() for part in recorded.tokens.split(lengths)]


def check_limits(limits: tuple[int, ...], spec: StepSpec) -> None:
    """Raises: GroupRequestInvalid if the limits of a group's responses do not fit the step."""
    longest = spec.params.max_new_tokens
    if len(limits) != spec.samples_per_group or not all(1 <= n <= longest for n in limits):
        raise GroupRequestInvalid(
            f"limits {list(limits)}: must be {spec.samples_per_group} numbers from 1 to "
            f"max_new_tokens = {longest}"
        )
