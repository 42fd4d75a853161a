"""SGLang's sampler, with the draws of the run in place of its own randomness.

SGLang seeds requests in its deterministic mode alone, which has kernels for GPUs only. So a request
carries its `Draws` as parameters of a logit processor, which is what reaches a sampler row by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from services.rollout.engines.sglang.drawing import Draws, draw

if TYPE_CHECKING:
    from torch import Tensor

BACKEND = "pytorch"
"""SGLang's name of the one backend that all of its modes let a sampler have."""


class DrawsCarrier(CustomLogitProcessor):
    """Leaves logits as they are."""

    def __call__(
        self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> Tensor:
        """See the class."""
        del custom_param_list
        return logits


class DrawingSampler(Sampler):
    """Takes place of SGLang's own; requests without `Draws` are left to that."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
    ) -> Tensor:
        """[R] tokens; their log-probabilities become a part of `logits_output`."""
        carried = sampling_info.custom_params
        if carried is None:
            own = (top_logprobs_nums, token_ids_logprobs, positions)
            return super().forward(logits_output, sampling_info, return_logprob, *own)
        draws = [Draws.of(each) for each in carried]
        tokens_R, logprobs_R = draw(logits_output.next_token_logits, draws, positions)
        if return_logprob:
            logits_output.next_token_logprobs = logprobs_R.to(torch.float32)
        return tokens_R.to(torch.int32)


def register() -> None:
    """Have the models of this process sampled so."""
    register_sampler_backend(BACKEND, DrawingSampler)
