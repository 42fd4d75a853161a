"""A policy whose weights lie in shared memory of the test's own, and steps of an engine on it."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch

from common.config.sglang import SglangConfig
from common.ids import GroupId, StepIndex, WeightsVersion
from common.rl.sampling import SamplingParams
from common.tensors.intake import SharedMemory
from common.tensors.spec import DType, TensorSpec
from common.vlm.loading import empty_model, load_config, suppressed_token_ids, weight_layout
from common.vlm.model import SplitModel
from common.vlm.parallel.model import config_shape
from common.vlm.parallel.shards import rank_layout, shards
from common.vlm.parallel.state import take_shard
from common.vlm.tiny import random_init
from common.weights.binding import bind_parameters, views
from services.rollout.engines.protocol import GroupRequest, StepSpec
from services.rollout.engines.sglang.driver import HostDriver
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.sglang.messages import EngineSettings
from services.rollout.engines.sglang.weights import OfferedWeights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import Qwen2_5_VLConfig

    from common.vlm.parallel.shards import Shard
    from common.vlm.prompt import PromptTensors
    from common.weights.layout import WeightLayout
    from services.rollout.engines.protocol import Engine, FinishedGroup

MAX_REQUESTS = 8
CONTEXT_TOKENS = 512
SAMPLES = 2
KV_BYTES = 12345
"""What the engine is told that its K/V take."""
_FLAT = "flat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank of the engine reads.

    Attributes:
        shards: None: the rank is the only one.
    """

    layout: WeightLayout
    shards: Mapping[str, Shard] | None
    flat: torch.Tensor
    shared: SharedMemory

    @classmethod
    def of(cls, whole: WeightLayout, config: Qwen2_5_VLConfig, *, rank: int, ranks: int) -> Part:
        layout, parts = whole, None
        if ranks > 1:
            parts = shards(whole, config_shape(config), rank=rank, degree=ranks)
            layout = rank_layout(whole, parts, rank=rank, degree=ranks)
        spec = TensorSpec(name=_FLAT, dtype=DType.FLOAT32, shape=(layout.total_elements,))
        descriptor = os.memfd_create("policy")
        os.truncate(descriptor, spec.nbytes)
        flat = torch.frombuffer(mmap.mmap(descriptor, spec.nbytes), dtype=torch.float32)
        shared = SharedMemory(
            descriptor=descriptor, device="cpu", size_bytes=spec.nbytes, specs=(spec,)
        )
        return cls(layout=layout, shards=parts, flat=flat, shared=shared)

    def take(self, flat: torch.Tensor, layout: WeightLayout) -> None:
        """Cut it out of the whole policy."""
        assert self.shards is not None
        own = views(self.flat, self.layout)
        for name, whole in views(flat, layout).items():
            own[name].copy_(take_shard(whole, self.shards[name]))


class Driven(SglangEngine):
    """An engine beside the one that drives its processes."""

    def __init__(self, driver: HostDriver) -> None:
        super().__init__(driver, max_requests=MAX_REQUESTS, kv_bytes=KV_BYTES)
        self.driver = driver


@dataclass
class Policy:
    """See the module's text; a context manager that closes its memory."""

    path: Path
    config: Qwen2_5_VLConfig
    layout: WeightLayout
    flat: torch.Tensor
    parts: tuple[Part, ...]
    model: SplitModel
    version: int = 0

    @classmethod
    def of(cls, path: Path, *, train_vision: bool = False, ranks: int = 1) -> Policy:
        """Args: ranks: whose parts an engine is to read."""
        config = load_config(path)
        model = empty_model(config, dtype=torch.float32)
        layout = weight_layout(model, train_vision=train_vision, dtype=torch.float32)
        parts = tuple(Part.of(layout, config, rank=rank, ranks=ranks) for rank in range(ranks))
        flat = parts[0].flat if ranks == 1 else torch.zeros(layout.total_elements)
        bind_parameters(model, layout, flat, None)
        policy = cls(path, config, layout, flat, parts, SplitModel(model))
        policy.update(seed=0)
        return policy

    def update(self, *, seed: int) -> None:
        """Other weights, of the next version."""
        random_init(self.flat, self.layout, seed=seed, std=0.1, jitter=0.1)
        for part in self.parts if len(self.parts) > 1 else ():
            part.take(self.flat, self.layout)
        self.version += 1

    def engine(
        self,
        python: Path,
        folder: Path,
        *,
        layout: WeightLayout | None = None,
        step_tokens: int = 8 * CONTEXT_TOKENS,
        **config: Any,
    ) -> Driven:
        """An engine for this policy that is not started."""
        settings = EngineSettings(
            model_path=str(self.path),
            device="cpu",
            gpu=0,
            ranks=len(self.parts),
            dtype="float32",
            seed=3,
            max_requests=MAX_REQUESTS,
            context_tokens=CONTEXT_TOKENS,
            kv_tokens=8 * CONTEXT_TOKENS,
            step_tokens=step_tokens,
            memory_fraction=0.3,
            release_memory=config.get("release_memory", True),
            deterministic=False,
            arguments={},
        )
        table = SglangConfig(**config)
        aliased = self.parts if table.weights == "alias" else ()
        weights = OfferedWeights(
            layouts=tuple(part.layout for part in self.parts) if layout is None else (layout,),
            flat=self.flat,
            tensor=_FLAT,
            shared=tuple(
                replace(part.shared, descriptor=os.dup(part.shared.descriptor)) for part in aliased
            ),
            bucket_bytes=1 << 16,
        )
        driver = HostDriver(python, table, settings, weights, folder=folder)
        return Driven(driver)

    def spec(self, *, groups: int = 1, samples: int = SAMPLES, **params: Any) -> StepSpec:
        """A step on the present weights."""
        fixed = {"max_new_tokens": 6, "stop_token_ids": ()}
        return StepSpec(
            step=StepIndex(self.version),
            weights_version=WeightsVersion(self.version),
            seed=11,
            groups=tuple(GroupId(group) for group in range(groups)),
            samples_per_group=samples,
            params=SamplingParams(
                **{**fixed, **params}, suppressed_token_ids=suppressed_token_ids(self.config)
            ),
        )

    def request(self, group: int, prompt: PromptTensors, **further: Any) -> GroupRequest:
        """A prompt with what this policy's tower makes of it."""
        vision = self.model.vision_embeddings(prompt).detach() if prompt.vision_tokens else None
        return GroupRequest(
            group=GroupId(group), prompt=prompt.without_pixels(), vision=vision, **further
        )

    @torch.no_grad()
    def logprobs(self, prompt: PromptTensors, finished: FinishedGroup, spec: StepSpec) -> Any:
        """[T] of what was sampled, by the trainer's own pass."""
        vision = self.model.vision_embeddings(prompt)
        return self.model.response_logprobs(
            last_token=prompt.last_token,
            start_position=prompt.start_position,
            prefix=self.model.prefix_kv(prompt, vision),
            tokens_T=finished.tokens,
            lengths_G=finished.lengths.tolist(),
            temperature=spec.params.temperature or 1.0,
            suppressed=torch.tensor(spec.params.suppressed_token_ids),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            os.close(part.shared.descriptor)


def run_step(
    engine: Engine, spec: StepSpec, requests: Sequence[GroupRequest]
) -> list[FinishedGroup]:
    """Decode a step to its end; the groups in their order."""
    engine.begin_step(spec)
    for request in requests:
        engine.add_group(request)
    finished: list[FinishedGroup] = []
    while not engine.finished:
        while engine.admit_next() is not None:
            pass
        finished += engine.run_iteration().finished
    engine.release()
    return sorted(finished, key=lambda group: group.group)


def renamed(layout: WeightLayout, old: str, new: str) -> WeightLayout:
    """A layout in which one weight has another name."""
    entries = tuple(
        replace(entry, name=new) if entry.name == old else entry for entry in layout.entries
    )
    return replace(layout, entries=entries)
