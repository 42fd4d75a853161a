"""Whether an engine gives the trainer's log-probabilities: asked once, before a run's first step.

Shapes: P+1 prompt tokens, T tokens of a group's responses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.ids import GroupId
from common.vlm.loading import text_config, vision_config
from common.vlm.prompt import PromptTensors, prepare_prompt
from services.rollout.engines.errors import LogprobGateFailed
from services.rollout.engines.protocol import GroupRequest, StepSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Qwen2_5_VLConfig

    from common.rl.sampling import SamplingParams
    from common.vlm.model import SplitModel
    from services.rollout.engines.protocol import Engine, FinishedGroup

Grids = tuple[tuple[int, int, int], ...]

_KINDS: dict[str, tuple[Grids, Grids]] = {
    "text": ((), ()),
    "image": (((1, 4, 4),), ()),
    "video": ((), ((2, 4, 4),)),
}
"""Grids of images and videos, in merged patches across and down."""
_TEXT_TOKENS = 6
_SECONDS = 0.7
SAMPLES, NEW_TOKENS = 2, 8


def logprob_gate(
    engine: Engine, model: SplitModel, spec: StepSpec, *, bound: float
) -> dict[str, float]:
    """Sample a few tokens on a text, an image and a video, and score them by the trainer's pass.

    Args:
        engine: has no step.
        model: on the weights that the engine reads.
        spec: from `gate_step`; its weights are held.
        bound: largest difference that is let through.
    Returns: the largest difference of each kind of prompt.
    Raises: LogprobGateFailed; what the engine raises.
    """
    prompts = [
        _prompt(model.config, images, videos).to(model.device) for images, videos in _KINDS.values()
    ]
    with torch.no_grad():
        visions = [model.vision_embeddings(prompt) for prompt in prompts]
        finished = _decode(engine, spec, prompts, visions)
        found = {
            kind: _difference(model, spec, *each)
            for kind, each in zip(_KINDS, zip(prompts, visions, finished, strict=True), strict=True)
        }
    # not "greater than": NaN does not pass
    if not all(difference <= bound for difference in found.values()):
        shown = ", ".join(f"{kind} {difference:.2e}" for kind, difference in found.items())
        raise LogprobGateFailed(
            f"log-probabilities of engine and trainer differ by up to {shown}; the bound is "
            f"{bound:.2e} (rollout.sglang.logprob_bound)",
            bound=bound,
            **found,
        )
    return found


def gate_step(step: StepSpec, params: SamplingParams) -> StepSpec:
    """The gate's own step, on the weights of a step that is about to begin."""
    return StepSpec(
        step=step.step,
        weights_version=step.weights_version,
        seed=step.seed,
        groups=tuple(GroupId(group) for group in range(len(_KINDS))),
        samples_per_group=SAMPLES,
        params=params,
    )


def _decode(
    engine: Engine,
    spec: StepSpec,
    prompts: Sequence[PromptTensors],
    visions: Sequence[torch.Tensor],
) -> list[FinishedGroup]:
    engine.begin_step(spec)
    try:
        for group, prompt, vision in zip(spec.groups, prompts, visions, strict=True):
            engine.add_group(GroupRequest(group=group, prompt=prompt, vision=vision))
        finished: list[FinishedGroup] = []
        while not engine.finished:
            while engine.admit_next() is not None:
                pass
            finished += engine.run_iteration().finished
    finally:
        engine.abort()
    return sorted(finished, key=lambda group: group.group)


def _difference(
    model: SplitModel,
    spec: StepSpec,
    prompt: PromptTensors,
    vision: torch.Tensor,
    finished: FinishedGroup,
) -> float:
    params = spec.params
    trainer_T = model.response_logprobs(
        last_token=prompt.last_token,
        start_position=prompt.start_position,
        prefix=model.prefix_kv(prompt, vision),
        tokens_T=finished.tokens.to(model.device),
        lengths_G=finished.lengths.tolist(),
        temperature=params.temperature or 1.0,
        suppressed=torch.tensor(params.suppressed_token_ids, device=model.device),
    )
    return float((trainer_T.cpu() - finished.logprobs).abs().max())


def _prompt(config: Qwen2_5_VLConfig, images: Grids, videos: Grids) -> PromptTensors:
    """Text, pictures, text, all of it random and always the same."""
    generator = torch.Generator().manual_seed(0)
    vision = vision_config(config)
    merge = vision.spatial_merge_size
    special = {config.image_token_id, config.video_token_id}
    special |= {config.vision_start_token_id, config.vision_end_token_id}
    plain = [token for token in range(text_config(config).vocab_size) if token not in special]
    ids: list[int] = []

    def text() -> None:
        picked = torch.randint(len(plain), (_TEXT_TOKENS,), generator=generator)
        ids.extend(plain[int(one)] for one in picked)

    text()
    for grids, token in ((images, config.image_token_id), (videos, config.video_token_id)):
        for frames, height, width in grids:
            placeholders = [token] * (frames * height * width)
            ids += [config.vision_start_token_id, *placeholders, config.vision_end_token_id]
    text()
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def grid(of: Grids) -> torch.Tensor:
        patches = [(frames, merge * height, merge * width) for frames, height, width in of]
        return torch.tensor(patches, dtype=torch.int64).reshape(-1, 3)

    def pixels(of: Grids) -> torch.Tensor:
        patches = int(grid(of).prod(dim=1).sum())
        return torch.randn((patches, values), generator=generator)

    return prepare_prompt(
        config,
        token_ids=torch.tensor(ids),
        pixel_values=pixels(images),
        image_grid_thw=grid(images),
        pixel_values_videos=pixels(videos),
        video_grid_thw=grid(videos),
        second_per_grid_ts=torch.full((len(videos),), _SECONDS),
        sample="the gate's prompt",
    )
