"""The forwards of both roles, the same for this step's prompts and for the next one's.

To be called in the compute thread, under read holds of the weights that they read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from common.vlm.prefix import PrefixKV
    from common.vlm.prompt import PromptTensors
    from services.prefix_encoder.run import PrefixEncoderRun


class Forwards:
    """Of one epoch. Shapes: V vision tokens, h hidden width."""

    def __init__(self, run: PrefixEncoderRun, *, training: bool) -> None:
        """Args: training: whether what trains gets a graph."""
        self._run = run
        self._training = training
        recipe = run.context.recipe.training
        self._checkpointing = training and recipe.activation_checkpointing
        self._vision_checkpointing = training and run.context.checkpoints_vision

    def policy_vision(self, prompt: PromptTensors) -> torch.Tensor:
        """[V, h], with its graph where the tower trains."""
        with torch.set_grad_enabled(self._training):
            return self._run.policy.vision_embeddings(
                prompt, checkpointing=self._vision_checkpointing
            )

    def policy_prefix(
        self, prompt: PromptTensors, vision: torch.Tensor, *, with_graph: bool
    ) -> PrefixKV:
        """Args: vision: [V, h] of `policy_vision`."""
        with torch.set_grad_enabled(with_graph):
            return self._run.policy.prefix_kv(
                prompt, vision, checkpointing=with_graph and self._checkpointing
            )

    def reference_prefix(self, prompt: PromptTensors, vision: torch.Tensor | None) -> PrefixKV:
        """Args: vision: [V, h] of `policy_vision`, for where it serves both roles; None: run the
        reference's own tower, which gives the same there.
        """
        run, model = self._run, self._run.reference
        assert model is not None
        with torch.no_grad():
            if vision is None or not run.vision_is_shared():
                vision = model.vision_embeddings(prompt)
            vision = vision.detach()
            for _ in range(run.context.recipe.prefix_passes - 1):
                model.prefix_kv(prompt, vision)
            return model.prefix_kv(prompt, vision)
