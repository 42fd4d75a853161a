"""The tensors of one prepared prompt, and the positions of its tokens.

Shapes: P+1 = tokens of the prompt, of which the first P are the prefix; N = images or videos;
D = values of one patch (channels x temporal patch x patch height x patch width).

Positions are computed here by the rule that Qwen2.5-VL was trained with: text after an image or
video goes on above the highest position of any axis, time included. The library's versions differ
from it and from each other for videos: some start text at the box's longer side although time
runs past it, and some truncate the seconds of a temporal patch to whole ones. A position has to
mean the same in every process of a run and in every engine.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.vlm.errors import PromptInvalid
from common.vlm.loading import vision_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import Qwen2_5_VLConfig

TEXT, IMAGE, VIDEO = 0, 1, 2
"""Values of `PromptTensors.mm_token_type_ids`."""

_MODALITY = {IMAGE: "image", VIDEO: "video"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTensors:
    """One prompt, tokenized and pixel-processed. Absent modalities are empty tensors.

    Attributes:
        token_ids: [P+1] int64; the last one is text.
        positions: [3, P+1] int64; temporal, height and width position of each token.
        mm_token_type_ids: [P+1] int64; 0 text, 1 image, 2 video.
        pixel_values: [patches, D] floating; all images, in token order.
        image_grid_thw: [N, 3] int64; each image's grid in patches.
        pixel_values_videos: [patches, D] floating; all videos, in token order.
        video_grid_thw: [N, 3] int64; each video's grid in (temporal) patches.
        second_per_grid_ts: [N] float32; seconds that a temporal patch of each video spans.
    """

    token_ids: Tensor
    positions: Tensor
    mm_token_type_ids: Tensor
    pixel_values: Tensor
    image_grid_thw: Tensor
    pixel_values_videos: Tensor
    video_grid_thw: Tensor
    second_per_grid_ts: Tensor

    @property
    def prefix_tokens(self) -> int:
        """P: tokens of the prompt without its last one."""
        return self.token_ids.shape[0] - 1

    @property
    def last_token(self) -> int:
        """Id of the last prompt token, the first input of every response."""
        return int(self.token_ids[-1])

    @property
    def start_position(self) -> int:
        """Position, equal on all three axes, of the last prompt token; responses count on."""
        return int(self.positions[0, -1])

    @property
    def rope_delta(self) -> int:
        """What a text token after the prompt adds to its index to get its position."""
        return self.start_position - self.prefix_tokens

    @property
    def vision_tokens(self) -> int:
        """Number of placeholders, which is the number of rows of the vision embeddings."""
        return int((self.mm_token_type_ids != TEXT).sum())

    def to(self, device: torch.device | str) -> PromptTensors:
        """The same prompt on another device."""
        return PromptTensors(**{k: v.to(device) for k, v in self.named_tensors().items()})

    def without_pixels(self) -> PromptTensors:
        """The same prompt for a prefix forward from given vision embeddings."""
        return replace(
            self,
            pixel_values=self.pixel_values[:0].clone(),
            pixel_values_videos=self.pixel_values_videos[:0].clone(),
        )

    def named_tensors(self) -> dict[str, Tensor]:
        """All tensors by the names of their attributes: what a lease of a prompt holds."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_named_tensors(cls, tensors: Mapping[str, Tensor]) -> PromptTensors:
        """The prompt of which `named_tensors` gave these; others in the mapping are ignored.

        Raises: PromptInvalid naming what is missing.
        """
        names = [field.name for field in fields(cls)]
        if missing := [name for name in names if name not in tensors]:
            raise PromptInvalid(f"a prompt lacks {', '.join(missing)}")
        return cls(**{name: tensors[name] for name in names})


def prepare_prompt(
    config: Qwen2_5_VLConfig,
    *,
    token_ids: Tensor,
    pixel_values: Tensor | None = None,
    image_grid_thw: Tensor | None = None,
    pixel_values_videos: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
    sample: str = "prompt",
) -> PromptTensors:
    """Check a processor's output and add token types and positions.

    Args:
        config: whose placeholder ids, merge size and patch shape hold.
        token_ids: [P+1] int64 with one placeholder a merged patch.
        pixel_values, pixel_values_videos: [patches, D]; None if there are none.
        image_grid_thw, video_grid_thw: [N, 3]; None if there are none.
        second_per_grid_ts: [N] floating; seconds of each temporal patch, 1 if not given.
        sample: how errors name this prompt.
    Raises: PromptInvalid if the tokens, grids and pixels do not agree, or if the prompt ends in
        a placeholder.
    """
    images = _grid(config, image_grid_thw, f"{sample}: image_grid_thw")
    videos = _grid(config, video_grid_thw, f"{sample}: video_grid_thw")
    if token_ids.dim() != 1 or token_ids.numel() == 0:
        raise PromptInvalid(f"{sample}: token_ids has shape {tuple(token_ids.shape)}, not [P+1]")
    seconds = torch.ones(len(videos)) if second_per_grid_ts is None else second_per_grid_ts
    types = token_types(config, token_ids)
    positions = prompt_positions(
        config,
        mm_token_type_ids=types,
        image_grid_thw=images,
        video_grid_thw=videos,
        second_per_grid_ts=seconds,
        sample=sample,
    )
    if int(types[-1]) != TEXT:
        raise PromptInvalid(f"{sample}: ends in a vision placeholder; the last token must be text")
    return PromptTensors(
        token_ids=token_ids.to(torch.int64),
        positions=positions,
        mm_token_type_ids=types,
        pixel_values=_pixels(config, pixel_values, images, f"{sample}: pixel_values"),
        image_grid_thw=images,
        pixel_values_videos=_pixels(
            config, pixel_values_videos, videos, f"{sample}: pixel_values_videos"
        ),
        video_grid_thw=videos,
        second_per_grid_ts=seconds.to(torch.float32),
    )


def token_types(config: Qwen2_5_VLConfig, token_ids: Tensor) -> Tensor:
    """[S] int64: 0 text, 1 image, 2 video, of token ids [S]."""
    types = torch.zeros_like(token_ids, dtype=torch.int64)
    types[token_ids == config.image_token_id] = IMAGE
    types[token_ids == config.video_token_id] = VIDEO
    return types


def prompt_positions(
    config: Qwen2_5_VLConfig,
    *,
    mm_token_type_ids: Tensor,
    image_grid_thw: Tensor,
    video_grid_thw: Tensor,
    second_per_grid_ts: Tensor,
    sample: str = "prompt",
) -> Tensor:
    """M-RoPE positions: text counts on all axes, vision spans a box of its grid.

    After an image or video, text goes on above the box's highest position on any axis.

    Args:
        config: whose merge size and ``tokens_per_second`` hold.
        mm_token_type_ids: [S] int64 as in `PromptTensors`.
        image_grid_thw, video_grid_thw: [N, 3] int64.
        second_per_grid_ts: [N] floating, one a video.
        sample: how errors name this prompt.
    Returns: [3, S] int64 on the host.
    Raises: PromptInvalid if a run of placeholders has not the length that its grid says, or if
        runs and grids are not equally many.
    """
    merge = vision_config(config).spatial_merge_size
    if len(second_per_grid_ts) != len(video_grid_thw):
        raise PromptInvalid(
            f"{sample}: {len(second_per_grid_ts)} values of second_per_grid_ts for "
            f"{len(video_grid_thw)} videos"
        )
    seconds = second_per_grid_ts.to(device="cpu", dtype=torch.float32)
    per_second = vision_config(config).tokens_per_second
    grids: dict[int, Iterator[list[int]]] = {
        IMAGE: iter(image_grid_thw.tolist()),
        VIDEO: iter(video_grid_thw.tolist()),
    }
    seconds_of_video = iter(seconds)
    parts = [torch.zeros((3, 0), dtype=torch.int64)]
    start = 0
    for kind, run in groupby(mm_token_type_ids.tolist()):
        length = len(list(run))
        if kind == TEXT:
            parts.append(torch.arange(start, start + length).expand(3, -1))
            start += length
            continue
        grid = next(grids[kind], None)
        if grid is None:
            raise PromptInvalid(f"{sample}: more {_MODALITY[kind]} placeholders than grids")
        frames, height, width = grid[0], grid[1] // merge, grid[2] // merge
        if length != (expected := frames * height * width):
            raise PromptInvalid(
                f"{sample}: {length} {_MODALITY[kind]} tokens in a row for a grid of {grid}, "
                f"which has {expected} features"
            )
        times = torch.arange(frames)
        if kind == VIDEO:
            times = (times * next(seconds_of_video) * per_second).to(torch.int64)
        box = _box(times, height, width) + start
        parts.append(box)
        start = int(box.max()) + 1
    for kind, rest in grids.items():
        if (unused := len(list(rest))) > 0:
            raise PromptInvalid(f"{sample}: {unused} {_MODALITY[kind]} grids without placeholders")
    return torch.cat(parts, dim=1)


def _box(times: Tensor, height: int, width: int) -> Tensor:
    """[3, frames * height * width] int64: positions inside one grid, given its frames' times."""
    axes = torch.meshgrid(times, torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack(axes).reshape(3, -1)


def _grid(config: Qwen2_5_VLConfig, grid: Tensor | None, name: str) -> Tensor:
    if grid is None:
        return torch.zeros((0, 3), dtype=torch.int64)
    if grid.dim() != 2 or grid.shape[1] != 3:
        raise PromptInvalid(f"{name} has shape {tuple(grid.shape)}, not [N, 3]")
    merge = vision_config(config).spatial_merge_size
    if bool((grid <= 0).any()) or bool((grid[:, 1:] % merge).any()):
        raise PromptInvalid(
            f"{name} is {grid.tolist()}: grids are positive, height and width multiples of {merge}"
        )
    return grid.to(torch.int64)


def _pixels(config: Qwen2_5_VLConfig, pixels: Tensor | None, grid: Tensor, name: str) -> Tensor:
    vision = vision_config(config)
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches = int(grid.prod(dim=1).sum())
    if pixels is None:
        pixels = torch.zeros((0, width))
    if pixels.shape != (patches, width):
        raise PromptInvalid(
            f"{name} has shape {tuple(pixels.shape)}; the grids say ({patches}, {width})"
        )
    return pixels
