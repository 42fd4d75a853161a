"""What the rollout service and the engine's host say to each other.

The service asks one thing at a time and waits for the answer to it, `DONE` or `FAILED`; `DECODE`
and `DROP` have no answer. Between answers the host reports on what decodes: `PROGRESS`, `SAMPLED`
and `BROKE`.

Shapes: P+1 prompt tokens, V vision tokens, h hidden width, T tokens of one response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.rollout.engines.sglang.wire import Frame

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

# from the service

START = "start"
"""First of all. `body`: `settings` (`EngineSettings`) and `ranks`, for each of the engine's ranks
its `layout` (`WeightLayout` as JSON) and `memory` (`WeightMemory`, with a descriptor each; null:
weights come by `LOAD`). Answered when the engine is up, with `aliased_bytes` and `copied_bytes` of
the weights of all ranks."""
LOAD = "load"
"""A bucket of weights. Tensors by their names in a checkpoint."""
REFRESH = "refresh"
"""The weights are those of another version. `body`: `version`. What is not read in place is copied
again, and all caches are emptied."""
DECODE = "decode"
"""Sample a group: see `GroupSampling`. Not answered."""
DROP = "drop"
"""End a group's requests. `body`: `group`. Not answered; what is on its way still comes."""
ABORT = "abort"
"""End all requests; the answer comes when none is left, and nothing of them comes after it."""
RESUME = "resume"
"""Have memory for keys and values again. Answered."""
RELEASE = "release"
"""Give that memory back to the device. Answered, when nothing decodes and it is given back."""
STOP = "stop"
"""End the engine in order; the answer is the channel's end."""

# from the host

DONE = "done"
"""What was asked for is done."""
FAILED = "failed"
"""It is not. `body`: `message`."""
PROGRESS = "progress"
"""Tokens were sampled. `body`: `tokens`, how many since the last report; `steps`, in how many steps
of the decode; `active`, how many responses have tokens and are not complete."""
SAMPLED = "sampled"
"""A response is complete: see `SampledResponse`."""
BROKE = "broke"
"""A request of a group failed. `body`: `group`, `message`."""

# between the host and the process of one of the engine's ranks

ATTACH = "attach"
"""A rank's model is there. `body`: `rank`. Answered with what `START` says of the rank, and the
descriptor."""

PLACEHOLDER = "rollplex.placeholder"
"""Name of the one tensor in the folder that the engine reads its model from."""

TOKEN_IDS, POSITIONS, TYPES, VISION = "token_ids", "positions", "mm_token_type_ids", "vision"
TOKENS, LOGPROBS = "tokens", "logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSampling:
    """A group to be sampled on one prompt.

    Attributes:
        group: its id.
        token_ids: [P+1] int64.
        positions: [3, P+1] int64.
        mm_token_type_ids: [P+1] int64; 0 text, 1 image, 2 video.
        vision: [V, h], in the order of the placeholders.
        limits: most tokens of each response.
        seed, step: of the run and its training step; what tokens are drawn by, with group and
            number of the response.
        sampling: SGLang's sampling parameters that all responses share.
    """

    group: int
    token_ids: Tensor
    positions: Tensor
    mm_token_type_ids: Tensor
    vision: Tensor
    limits: tuple[int, ...]
    seed: int
    step: int
    sampling: Mapping[str, Any]

    def frame(self) -> Frame:
        """As it travels."""
        body = {
            "group": self.group,
            "limits": list(self.limits),
            "seed": self.seed,
            "step": self.step,
            "sampling": dict(self.sampling),
        }
        tensors = {
            TOKEN_IDS: self.token_ids,
            POSITIONS: self.positions,
            TYPES: self.mm_token_type_ids,
            VISION: self.vision,
        }
        return Frame(kind=DECODE, body=body, tensors=tensors)

    @classmethod
    def of(cls, frame: Frame) -> GroupSampling:
        """What `frame` made."""
        body, tensors = frame.body, frame.tensors
        return cls(
            group=body["group"],
            token_ids=tensors[TOKEN_IDS],
            positions=tensors[POSITIONS],
            mm_token_type_ids=tensors[TYPES],
            vision=tensors[VISION],
            limits=tuple(body["limits"]),
            seed=body["seed"],
            step=body["step"],
            sampling=body["sampling"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledResponse:
    """A complete response.

    Attributes:
        group, sample: which one.
        tokens: [T] int64.
        logprobs: [T] float32.
        versions: of the weights that sampled it; a step's own is expected to be the only one.
        cached_tokens: of the prompt, that were not computed for this response.
    """

    group: int
    sample: int
    tokens: Tensor
    logprobs: Tensor
    versions: tuple[str, ...]
    cached_tokens: int

    def frame(self) -> Frame:
        """As it travels."""
        body = {
            "group": self.group,
            "sample": self.sample,
            "versions": list(self.versions),
            "cached_tokens": self.cached_tokens,
        }
        return Frame(
            kind=SAMPLED, body=body, tensors={TOKENS: self.tokens, LOGPROBS: self.logprobs}
        )

    @classmethod
    def of(cls, frame: Frame) -> SampledResponse:
        """What `frame` made."""
        body, tensors = frame.body, frame.tensors
        return cls(
            group=body["group"],
            sample=body["sample"],
            tokens=tensors[TOKENS],
            logprobs=tensors[LOGPROBS],
            versions=tuple(body["versions"]),
            cached_tokens=body["cached_tokens"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMemory:
    """The policy's flat weights, where the broker has them.

    Attributes:
        device: `cpu`, or a GPU's UUID.
        size_bytes: of the whole allocation.
        offset_bytes: of the weights in it.
    """

    device: str
    size_bytes: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the engine is started.

    Attributes:
        model_path: folder with the configuration and the file of `PLACEHOLDER`.
        device: `cpu` or `cuda`.
        gpu: number of the GPU in the host; of several ranks, of the first one's.
        ranks: tensor-parallel ranks of the engine.
        dtype: of weights and activations.
        seed: of the engine's own randomness.
        max_requests: sequences that decode at the same time.
        context_tokens: longest prompt with its response.
        kv_tokens: places for keys and values.
        step_tokens: places with which no prompt leaves the cache while its group decodes.
        memory_fraction: of the GPU's memory, that the engine may come to use.
        release_memory: whether `RELEASE` will come.
        deterministic: whether logits do not depend on the batch, by SGLang's own kernels.
        arguments: of SGLang's engine, in place of those that follow from the others.
    """

    model_path: str
    device: str
    gpu: int
    ranks: int
    dtype: str
    seed: int
    max_requests: int
    context_tokens: int
    kv_tokens: int
    step_tokens: int
    memory_fraction: float
    release_memory: bool
    deterministic: bool
    arguments: Mapping[str, Any]
