"""The split forward of one model role: vision, prefix, packed responses.

Shapes: P = prefix tokens (the prompt without its last token), V = vision tokens, G = responses,
T = tokens of all responses, L = layers, K = key/value heads, D = head width, h = hidden width.

The library's model is used for its modules; its ``forward`` is not called and its state
(``rope_deltas``) is neither read nor written. All functions follow the caller's grad mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.vlm import layers
from common.vlm.attention import AttentionBackend, SdpaAttention, packed_indices
from common.vlm.checkpointing import run_block
from common.vlm.errors import PromptInvalid, ResponseInvalid
from common.vlm.loading import head_dim, text_config
from common.vlm.names import HEAD, LANGUAGE, VISUAL
from common.vlm.prefix import PrefixKV
from common.vlm.prompt import IMAGE, TEXT, VIDEO, PromptTensors
from common.vlm.steps import LayerSteps, PlainSteps
from common.vlm.vision import vision_tower

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from common.vlm.parallel.group import RankGroup

DEFAULT_LOGIT_CHUNK_TOKENS = 512


class SplitModel:
    """A bound Qwen2.5-VL, run in parts.

    One process may hold several: one a role. Not thread-safe while gradients accumulate.
    """

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        *,
        attention: AttentionBackend | None = None,
        steps: LayerSteps | None = None,
        logit_chunk_tokens: int = DEFAULT_LOGIT_CHUNK_TOKENS,
    ) -> None:
        """Take the modules of a model whose parameters are bound to their storage.

        Args:
            model: from `empty_model`, bound.
            attention: the text model's attention kernels; SDPA if not given.
            steps: everything between attentions; the library's modules if not given.
            logit_chunk_tokens: rows of logits alive at once.
        """
        self.config: Qwen2_5_VLConfig = model.config
        self.visual: Any = model.model.visual
        self.language: Any = model.model.language_model
        self.head: Any = model.lm_head
        self._attention: AttentionBackend = attention or SdpaAttention()
        self._steps: LayerSteps = steps or PlainSteps()
        self._logit_chunk_tokens = logit_chunk_tokens

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the compute weights and of hidden states."""
        return self.language.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.language.embed_tokens.weight.device

    @property
    def kv_heads(self) -> int:
        """Key/value heads that this process computes: all of them, or a tensor-parallel rank's."""
        rows = self.language.layers[0].self_attn.k_proj.out_features
        return int(rows // head_dim(self.config))

    @property
    def fused(self) -> bool:
        """Whether it runs on kernels for GPUs."""
        return not isinstance(self._steps, PlainSteps)

    @property
    def group(self) -> RankGroup | None:
        """Ranks over which whoever runs its weights without its steps has to sum; None: nobody."""
        return self._steps.group

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its in-memory name, tied ones under each of their names."""
        for prefix, module in ((VISUAL, self.visual), (LANGUAGE, self.language), (HEAD, self.head)):
            yield from module.named_parameters(prefix=prefix[:-1], remove_duplicate=False)

    def vision_embeddings(self, prompt: PromptTensors, *, checkpointing: bool = False) -> Tensor:
        """Features of all images and videos, in the order of their placeholders.

        Args:
            prompt: on this model's device.
            checkpointing: keep each tower block's input only.
        Returns: [V, h]; with a graph if the tower trains and gradients are enabled.
        """
        parts: list[Tensor] = []
        indices: list[Tensor] = []
        for kind, pixels, grid in (
            (IMAGE, prompt.pixel_values, prompt.image_grid_thw),
            (VIDEO, prompt.pixel_values_videos, prompt.video_grid_thw),
        ):
            if grid.shape[0] > 0:
                parts.append(
                    vision_tower(
                        self.visual,
                        pixels,
                        grid,
                        checkpointing=checkpointing,
                        blocks=self._steps.vision,
                    )
                )
                indices.append((prompt.mm_token_type_ids == kind).nonzero()[:, 0])
        if not parts:
            width = text_config(self.config).hidden_size
            return torch.zeros((0, width), dtype=self.dtype, device=self.device)
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)[torch.argsort(torch.cat(indices))]

    def prefix_kv(
        self, prompt: PromptTensors, vision: Tensor, *, checkpointing: bool = False
    ) -> PrefixKV:
        """Keys and values of the prefix in every layer.

        The last layer's attention, MLP and everything after are not computed. The values do not
        depend on the grad mode: training and rollout get the same bits.

        Args:
            prompt: on this model's device.
            vision: [V, h] from `vision_embeddings` of this role, or a detached copy of it.
            checkpointing: keep each layer's input only.
        Raises: PromptInvalid if `vision` has not one row a placeholder.
        """
        prefix = slice(0, prompt.prefix_tokens)
        hidden = self._embed_prompt(prompt, vision)[prefix]
        angles = layers.rotary(self.language, hidden, prompt.positions[:, prefix])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for layer in self.language.layers[:-1]:
            hidden, key, value = run_block(
                self._prefix_layer, layer, hidden, angles, checkpointing=checkpointing
            )
            keys.append(key)
            values.append(value)
        last = self.language.layers[-1]
        key, value = self._steps.key_value(last, hidden, angles)
        return PrefixKV(keys=[*keys, key], values=[*values, value])

    def response_logprobs(
        self,
        *,
        last_token: int,
        start_position: int,
        prefix: PrefixKV,
        tokens_T: Tensor,
        lengths_G: Sequence[int],
        temperature: float,
        suppressed: Tensor | None,
        checkpointing: bool = False,
    ) -> Tensor:
        """Log-probabilities of all responses of one group, packed in one row without padding.

        Args:
            last_token: id of the last prompt token, the first input of every response.
            start_position: its position, from `PromptTensors.start_position`.
            prefix: keys and values of the prompt's prefix.
            tokens_T: [T] int64 on this model's device; one response after the other.
            lengths_G: tokens of each response; 0 is legal.
            temperature: that the tokens were sampled with.
            suppressed: [n] int64 ids that could not be sampled, or None.
            checkpointing: keep each layer's input only.
        Returns: [T] float32, or float64 in a float64 model; without a graph if T is 0.
        Raises: ResponseInvalid if the lengths do not add up to T.
        """
        total = sum(lengths_G)
        if tuple(tokens_T.shape) != (total,) or min(lengths_G, default=0) < 0:
            raise ResponseInvalid(
                f"response lengths {list(lengths_G)} do not make {tuple(tokens_T.shape)} tokens"
            )
        if total == 0:
            precise = torch.float64 if self.dtype == torch.float64 else torch.float32
            return torch.zeros(0, dtype=precise, device=tokens_T.device)
        hidden = self._response_hidden(
            last_token, start_position, prefix, tokens_T, lengths_G, checkpointing
        )
        return self._steps.logprobs(
            self.head,
            hidden,
            tokens_T,
            temperature=temperature,
            suppressed=suppressed,
            chunk_tokens=self._logit_chunk_tokens,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, C] over the whole vocabulary, of normed hidden states [R, h]; without gradients."""
        return self._steps.logits(self.head, hidden)

    def _response_hidden(
        self,
        last_token: int,
        start_position: int,
        prefix: PrefixKV,
        tokens_T: Tensor,
        lengths_G: Sequence[int],
        checkpointing: bool,
    ) -> Tensor:
        """Normed hidden states [T, h] from which each response token was sampled."""
        device = tokens_T.device
        _, index_T = packed_indices(lengths_G, device)
        inputs_T = torch.where(index_T == 0, last_token, tokens_T.roll(1))
        hidden = self._steps.embed(self.language.embed_tokens, inputs_T)
        positions = (start_position + index_T).expand(3, -1)
        angles = layers.rotary(self.language, hidden, positions)
        plan = self._attention.plan(prefix.tokens, lengths_G, device)
        for number, layer in enumerate(self.language.layers):
            shared = (prefix.keys[number], prefix.values[number])
            hidden = run_block(
                self._response_layer,
                layer,
                hidden,
                angles,
                shared,
                plan,
                checkpointing=checkpointing,
            )
        return self._steps.norm(self.language.norm, hidden)

    def _embed_prompt(self, prompt: PromptTensors, vision: Tensor) -> Tensor:
        """[P+1, h]: token embeddings with vision features in the placeholders' rows."""
        rows = (prompt.mm_token_type_ids != TEXT).nonzero()[:, 0]
        if rows.shape[0] != vision.shape[0]:
            raise PromptInvalid(
                f"the prompt has {rows.shape[0]} vision tokens and {vision.shape[0]} features"
            )
        hidden = self._steps.embed(self.language.embed_tokens, prompt.token_ids)
        return hidden.index_put((rows,), vision.to(hidden.dtype)) if rows.shape[0] else hidden

    def _prefix_layer(
        self, layer: Any, hidden: Tensor, angles: layers.Rotary
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self._steps.query_key_value(layer, hidden, angles)
        if hidden.shape[0] == 0:
            return hidden, key, value
        attended = self._attention.prefix(query, key, value)
        return self._steps.finish(layer, hidden, attended), key, value

    def _response_layer(
        self,
        layer: Any,
        hidden: Tensor,
        angles: layers.Rotary,
        shared: tuple[Tensor, Tensor],
        plan: Any,
    ) -> Tensor:
        query, *own = self._steps.query_key_value(layer, hidden, angles)
        attended = self._attention.responses(query, shared, (own[0], own[1]), plan)
        return self._steps.finish(layer, hidden, attended)
