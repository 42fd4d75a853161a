"""One group while SGLang samples it.

Shapes: G = responses of a group, T tokens of all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from services.rollout.engines.errors import EngineRefused, NonFiniteLogits, VersionMismatch
from services.rollout.engines.protocol import FinishedGroup, FinishReason

if TYPE_CHECKING:
    from common.ids import GroupId
    from common.rl.sampling import SamplingParams
    from services.rollout.engines.protocol import StepSpec
    from services.rollout.engines.sglang.messages import SampledResponse


class SampledGroup:
    """Responses of a group, as they come.

    Attributes:
        limits: [G] most tokens of each response.
    """

    def __init__(self, group: GroupId, spec: StepSpec, limits: tuple[int, ...] | None) -> None:
        self._group = group
        self._spec = spec
        self.limits = limits or (spec.params.max_new_tokens,) * spec.samples_per_group
        self._responses: dict[int, SampledResponse] = {}

    @property
    def missing(self) -> int:
        """Responses that are not complete."""
        return self._spec.samples_per_group - len(self._responses)

    def add(self, response: SampledResponse) -> None:
        """Take a complete response.

        Raises: VersionMismatch if other weights have sampled a token of it; NonFiniteLogits;
            EngineRefused if it ended where the step has no end.
        """
        spec, where = self._spec, f"response {response.sample} of group {self._group}"
        if response.versions != (str(spec.weights_version),):
            raise VersionMismatch(
                f"{where} was sampled by weights of versions {list(response.versions)}; the step's "
                f"is {spec.weights_version}",
                group=int(self._group),
                sample=response.sample,
            )
        finite = torch.isfinite(response.logprobs)
        if not bool(finite.all()):
            position = int((~finite).nonzero()[0])
            raise NonFiniteLogits(
                f"log-probability of token {position} of {where} is "
                f"{float(response.logprobs[position])} at weights version "
                f"{spec.weights_version}: must be finite",
                group=int(self._group),
                sample=response.sample,
                position=position,
                weights_version=int(spec.weights_version),
            )
        length, limit = len(response.tokens), self.limits[response.sample]
        if length != limit and not self._stopped(response):
            raise EngineRefused(
                f"{where} ended after {length} tokens, without a stop token and short of its "
                f"limit of {limit}"
            )
        self._responses[response.sample] = response

    def broke(self, message: str) -> EngineRefused:
        """The error for a group whose requests have failed."""
        return EngineRefused(f"SGLang, sampling group {self._group}: {message}")

    def finish(self, decode_iteration: int) -> FinishedGroup:
        """All responses, packed."""
        responses = [self._responses[sample] for sample in range(self._spec.samples_per_group)]
        reasons = [
            FinishReason.STOP if self._stopped(each) else FinishReason.LENGTH for each in responses
        ]
        return FinishedGroup(
            group=self._group,
            tokens=torch.cat([each.tokens for each in responses]),
            lengths=torch.tensor([len(each.tokens) for each in responses], dtype=torch.int64),
            logprobs=torch.cat([each.logprobs for each in responses]),
            finish_reasons=torch.tensor(reasons, dtype=torch.uint8),
            decode_iteration=decode_iteration,
            weights_version=self._spec.weights_version,
        )

    def _stopped(self, response: SampledResponse) -> bool:
        last = int(response.tokens[-1]) if len(response.tokens) else None
        return last in self._spec.params.stop_token_ids


def sampling_parameters(params: SamplingParams) -> dict[str, Any]:
    """SGLang's parameters of all responses of a step, lengths and seeds aside."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_new_tokens": params.min_new_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        # without stop tokens nothing ends a response but its length
        "ignore_eos": not params.stop_token_ids,
        "logit_bias": {str(token): float("-inf") for token in params.suppressed_token_ids},
    }
