"""Pictures and videos of a sample as patches for the vision tower.

Shapes: T = frames, Tp = frames of a temporal patch, H, W = pixels, S = patches of one frame,
C = channels, E = values of one channel of one patch, D = C x Tp x E.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from common.data.errors import SampleError, SampleFault
from common.vlm.errors import ModelFilesError
from common.vlm.files import COMBINED_PROCESSOR_FILE, IMAGE_PROCESSOR_FILE, read_json

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLConfig

VIDEO_PROCESSOR_FILE = "video_preprocessor_config.json"
DEFAULT_FRAMES_PER_SECOND = 2.0
"""Of a video that says no ``fps``; the rate that Qwen2.5-VL samples at."""

_SETTINGS = (
    "patch_size",
    "merge_size",
    "temporal_patch_size",
    "image_mean",
    "image_std",
    "rescale_factor",
    "resample",
    "do_resize",
    "do_rescale",
    "do_normalize",
    "do_convert_rgb",
)
_UNREADABLE = (OSError, ValueError, TypeError, SyntaxError, Image.DecompressionBombError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """One picture or video.

    Attributes:
        values: [patches, D] float32.
        grid_thw: (temporal patches, patches down, patches across).
        second_per_grid: seconds that a temporal patch spans; 1 for a picture.
    """

    values: np.ndarray
    grid_thw: tuple[int, int, int]
    second_per_grid: float = 1.0


class VisionProcessor:
    """Resizes, normalises and cuts pictures and videos, each exactly once."""

    def __init__(
        self,
        model_path: Path,
        config: Qwen2_5_VLConfig,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> None:
        """Read the settings in the model folder; pixel limits given here win.

        Raises: ModelFilesError if the settings do not fit the model.
        """
        image = _settings(model_path, IMAGE_PROCESSOR_FILE, "image_processor")
        video = _settings(model_path, VIDEO_PROCESSOR_FILE, "video_processor") or image
        limits = (min_pixels, max_pixels)
        self._images = _processor(model_path, config, image, limits)
        self._frames = _processor(model_path, config, video, limits)
        vision: Any = config.vision_config
        self._temporal_patch: int = vision.temporal_patch_size

    def image(self, part: Mapping[str, Any], sample: str) -> Patches:
        """Process one ``{"type": "image", "image": ...}``. Raises: SampleError."""
        source = part.get("image")
        try:
            batch = self._images(images=[open_image(source)], return_tensors="np")
        except _UNREADABLE as error:
            raise SampleError(
                SampleFault.UNREADABLE_IMAGE,
                sample,
                f"image {_describe(source)} cannot be used: {error}",
                source=_describe(source),
            ) from error
        _, height, width = batch["image_grid_thw"][0].tolist()
        values = np.ascontiguousarray(batch["pixel_values"], dtype=np.float32)
        return Patches(values=values, grid_thw=(1, height, width))

    def video(self, part: Mapping[str, Any], sample: str) -> Patches:
        """Process one ``{"type": "video", "video": ...}``.

        ``fps`` is the rate of the source and ``frames_indices`` the places in it of the frames
        given; without indices, the frames are consecutive. A clip whose length is not a multiple of
        the temporal patch is padded by repeating its last frame.
        Raises: SampleError.
        """
        source = part.get("video")
        try:
            frames = open_video(source)
            seconds = seconds_per_frame(
                len(frames), fps=part.get("fps"), indices=part.get("frames_indices")
            )
            batch = self._frames(images=frames, return_tensors="np")
        except _UNREADABLE as error:
            raise SampleError(
                SampleFault.UNREADABLE_VIDEO,
                sample,
                f"video {_describe(source)} cannot be used: {error}",
                source=_describe(source),
            ) from error
        _, height, width = batch["image_grid_thw"][0].tolist()
        values = group_frames(batch["pixel_values"], len(frames), self._temporal_patch)
        return Patches(
            values=values,
            grid_thw=(len(values) // (height * width), height, width),
            second_per_grid=seconds * self._temporal_patch,
        )


def group_frames(patches: np.ndarray, frames: int, temporal_patch: int) -> np.ndarray:
    """Make temporal patches from frames that were processed as single pictures.

    Args:
        patches: [T * S, D]; in each row one frame is repeated Tp times.
        frames: T.
        temporal_patch: Tp.
    Returns: [ceil(T / Tp) * S, D] float32, contiguous.
    """
    rows, values = patches.shape
    per_frame = rows // frames
    channels = 3
    single = patches.reshape(frames, per_frame, channels, temporal_patch, -1)[:, :, :, 0]
    missing = -frames % temporal_patch
    single = np.concatenate([single, np.repeat(single[-1:], missing, axis=0)])
    grouped = single.reshape(-1, temporal_patch, per_frame, channels, single.shape[-1])
    grouped = grouped.transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(grouped.reshape(-1, values), dtype=np.float32)


def seconds_per_frame(frames: int, *, fps: Any = None, indices: Any = None) -> float:
    """Mean time between two of the frames given.

    Raises: ValueError or TypeError saying what is wrong with ``fps`` or ``indices``.
    """
    rate = DEFAULT_FRAMES_PER_SECOND if fps is None else float(fps)
    if not (0.0 < rate < float("inf")):
        raise ValueError(f"fps is {fps!r}; a positive number is needed")
    if indices is None:
        return 1.0 / rate
    places = [int(index) for index in indices]
    if len(places) != frames:
        raise ValueError(f"{len(places)} frames_indices for {frames} frames")
    if any(later <= earlier for earlier, later in itertools.pairwise(places)):
        raise ValueError(f"frames_indices {places} do not increase")
    if frames == 1:
        return 1.0 / rate
    return (places[-1] - places[0]) / (frames - 1) / rate


def open_image(source: Any) -> Image.Image:
    """An RGB picture from a path, a PIL image or a uint8 array [H, W] or [H, W, C].

    Raises: OSError, ValueError or TypeError saying what is wrong.
    """
    if isinstance(source, str | Path):
        with Image.open(source) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB")
    if isinstance(source, Image.Image):
        return source.convert("RGB")
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8:
            raise TypeError(f"the array is {source.dtype}; uint8 is needed")
        if source.ndim not in (2, 3):
            raise ValueError(f"the array has shape {source.shape}, not [height, width, 3]")
        return Image.fromarray(source).convert("RGB")
    raise TypeError(f"a path, a PIL image or a uint8 array is needed, not {type(source).__name__}")


def open_video(source: Any) -> list[Image.Image]:
    """RGB frames of one size from a .npy file, an array [T, H, W, C] or a list of pictures.

    Raises: OSError, ValueError or TypeError saying what is wrong.
    """
    if isinstance(source, str | Path):
        if Path(source).suffix != ".npy":
            raise ValueError("a video file must be a .npy array of frames")
        source = np.load(source, allow_pickle=False)
    if not isinstance(source, np.ndarray | Sequence):
        raise TypeError(f"a .npy path, an array or a list is needed, not {type(source).__name__}")
    if isinstance(source, np.ndarray) and source.ndim != 4:
        raise ValueError(f"the array has shape {source.shape}, not [frames, height, width, 3]")
    frames = [open_image(frame) for frame in source]
    if not frames:
        raise ValueError("it has no frames")
    if len(sizes := {frame.size for frame in frames}) > 1:
        raise ValueError(f"its frames have different sizes: {sorted(sizes)}")
    return frames


def _settings(folder: Path, file: str, key: str) -> dict[str, Any]:
    if (folder / file).is_file():
        return read_json(folder / file)
    combined = folder / COMBINED_PROCESSOR_FILE
    return read_json(combined).get(key, {}) if combined.is_file() else {}


def _processor(
    folder: Path,
    config: Qwen2_5_VLConfig,
    settings: dict[str, Any],
    limits: tuple[int | None, int | None],
) -> Qwen2VLImageProcessorPil:
    size = dict(Qwen2VLImageProcessorPil.size) | dict(settings.get("size") or {})
    edges = {"shortest_edge": ("min_pixels", limits[0]), "longest_edge": ("max_pixels", limits[1])}
    for edge, (name, limit) in edges.items():
        size[edge] = limit or settings.get(name) or size[edge]
    if size["shortest_edge"] > size["longest_edge"]:
        raise ModelFilesError(
            f"{folder}: min_pixels is {size['shortest_edge']}, over max_pixels"
            f" {size['longest_edge']}",
            path=str(folder),
        )
    given = {name: settings[name] for name in _SETTINGS if settings.get(name) is not None}
    processor = Qwen2VLImageProcessorPil(size={edge: size[edge] for edge in edges}, **given)
    vision: Any = config.vision_config
    for name, has, needs in (
        ("patch_size", processor.patch_size, vision.patch_size),
        ("merge_size", processor.merge_size, vision.spatial_merge_size),
        ("temporal_patch_size", processor.temporal_patch_size, vision.temporal_patch_size),
    ):
        if has != needs:
            raise ModelFilesError(
                f"{folder}: the image processor's {name} is {has}, the model's is {needs}",
                path=str(folder),
            )
    return processor


def _describe(source: Any) -> str:
    if isinstance(source, str | Path):
        return repr(str(source))
    if isinstance(source, np.ndarray):
        return f"array of shape {source.shape}"
    return type(source).__name__
