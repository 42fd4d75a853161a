"""Reading and writing Qwen2.5-VL checkpoints from and to a rank's weights, a tensor at a time."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.vlm.errors import ModelFilesError
from common.vlm.files import INDEX_FILE, weight_files
from common.vlm.names import in_memory_name, on_disk_name
from common.weights.binding import torch_dtype
from common.weights.errors import LayoutMismatch, UnexpectedWeight, shown
from common.weights.layout import TensorEntry, WeightLayout, missing_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from transformers import Qwen2_5_VLConfig

    from common.vlm.parallel.shards import Shard

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
DEFAULT_SHARD_BYTES = 2 * 1024**3


def load_checkpoint(
    path: str | Path,
    layout: WeightLayout,
    tensors: Mapping[str, Tensor],
    *,
    shards: Mapping[str, Shard] | None = None,
) -> None:
    """Fill weights from a model folder, cast to their dtype.

    No more than one tensor of the checkpoint is held beside them.

    Args:
        path: folder with one safetensors file or an index of several.
        layout: of the whole model (world 1), or with `shards` of a rank.
        tensors: the layout's, by name, wherever they lie; written. Undefined after an error.
        shards: the rank's part of every tensor; nothing else is read from the files.
    Raises: ModelFilesError for an absent or unreadable file; MissingWeight or UnexpectedWeight
        naming the tensors; LayoutMismatch for a tensor of another shape.
    """
    if shards is None:
        _check_whole(layout)
    loaded: set[str] = set()
    unexpected: list[str] = []
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt", device="cpu") as shard:
                for disk_name in shard.keys():  # noqa: SIM118 - not a mapping
                    name = in_memory_name(disk_name)
                    if name in tensors:
                        part = None if shards is None else shards[name]
                        source = _read(shard, disk_name, part)
                        _copy(source, tensors[name], f"{file}: {disk_name}")
                        loaded.add(name)
                    elif name not in layout.aliases:
                        unexpected.append(disk_name)
        except (SafetensorError, OSError) as error:
            raise ModelFilesError(f"cannot read {file}: {error}", path=str(file)) from error
    if missing := [name for name in tensors if name not in loaded]:
        raise missing_error(missing, f"the checkpoint {path}")
    if unexpected:
        raise UnexpectedWeight(
            f"the checkpoint {path} has weights of no parameter: {shown(unexpected)}",
            names=unexpected,
        )


def save_checkpoint(
    path: str | Path,
    config: Qwen2_5_VLConfig,
    layout: WeightLayout,
    tensors: Mapping[str, Tensor],
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write configuration and weights as the library itself would name them.

    As `write_checkpoint`, from weights that are here.

    Args:
        path, config, max_shard_bytes: as there.
        layout: must be of the whole model (world 1).
        tensors: the layout's, by name, any device.
    Raises: LayoutMismatch for a layout of a rank's parts.
    """
    _check_whole(layout)
    write_checkpoint(
        path,
        config,
        layout,
        lambda entry: tensors[entry.name],
        dtype=torch_dtype(layout),
        max_shard_bytes=max_shard_bytes,
    )


def write_checkpoint(
    path: str | Path,
    config: Qwen2_5_VLConfig,
    layout: WeightLayout,
    whole: Callable[[TensorEntry], Tensor],
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write configuration and weights, asking for one whole tensor after the other.

    No more than one file's tensors are held at once. Tokenizer and processor files are not this
    function's. Files are written in place: a caller that needs all or nothing writes to a new
    folder and renames it.

    Args:
        path: folder; made if absent.
        config: left unchanged; saved with `dtype`.
        layout: must be of the whole model (world 1).
        whole: the weights of an entry, any device; called once an entry, in the layout's order.
        dtype: of these weights.
        max_shard_bytes: a file is closed before it exceeds this, unless one tensor does.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(layout, dtype.itemsize, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, entries in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {on_disk_name(e.name): whole(e).detach().cpu().clone() for e in entries}
        save_file(content, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(content, file))
    total_bytes = sum(entry.numel for entry in layout.entries) * dtype.itemsize
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
    saved = copy.deepcopy(config)
    saved.architectures = [ARCHITECTURE]
    saved.dtype = dtype
    saved.save_pretrained(folder)


def _check_whole(layout: WeightLayout) -> None:
    if layout.world != 1:
        raise LayoutMismatch(f"a checkpoint holds whole tensors, not part 1 of {layout.world}")


def _read(file: Any, disk_name: str, part: Shard | None) -> Tensor:
    """A tensor of an open file, or a rank's part of it.

    Raises: LayoutMismatch if the whole tensor has another shape than the part is of.
    """
    if part is None:
        return file.get_tensor(disk_name)
    stored = file.get_slice(disk_name)
    if (shape := tuple(stored.get_shape())) != part.whole:
        raise LayoutMismatch(f"{disk_name} has shape {shape}; the model has {part.whole}")
    return torch.cat([stored[tuple(slice(*one) for one in box.ranges)] for box in part.boxes])


def _copy(source: Tensor, target: Tensor, where: str) -> None:
    if source.shape != target.shape:
        raise LayoutMismatch(
            f"{where} has shape {tuple(source.shape)}; the model has {tuple(target.shape)}"
        )
    target.copy_(source)


def _shards(
    layout: WeightLayout, element_bytes: int, max_shard_bytes: int
) -> list[list[TensorEntry]]:
    shards: list[list[TensorEntry]] = [[]]
    used = 0
    for entry in layout.entries:
        size = entry.numel * element_bytes
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += size
    return shards
