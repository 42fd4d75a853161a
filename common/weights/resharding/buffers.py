"""The memory that a plan lays out on one GPU: training's tensors in it, and the rollout's.

Shapes: a tensor that lies in blocks has leading axes that count them, as its `View` says.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.layouts.box import minus_all
from common.weights.errors import LayoutMismatch
from common.weights.layout import missing_error, padded
from common.weights.placed import strided
from common.weights.resharding.regions import Buffer, regions, target_view

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from common.layouts.plan import GpuSharing
    from common.layouts.storage import View
    from common.layouts.tensors import RankTensor


def source_elements(gpu: GpuSharing) -> int:
    """Length of a flat buffer for what training and the rollout share on one GPU."""
    return _end(_source_sizes(gpu))


def sources_in(gpu: GpuSharing, flat: Tensor) -> dict[str, Tensor]:
    """Training's tensors of one rank in a flat buffer, with the rollout's gaps between them.

    Args:
        gpu: the rank's part of the plan.
        flat: [source_elements(gpu)]; it may be another process's.
    Returns: views by name, tied tensors under each of their names.
    """
    flats = _carved(_source_sizes(gpu), flat)
    return {
        name: strided(flats[key], view)
        for key, tensor, view in _source_views(gpu)
        for name in tensor.layer_names(key.layer)
    }


def allocate_sources(
    gpu: GpuSharing, *, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """As `sources_in`, in a new buffer of zeros."""
    return sources_in(gpu, torch.zeros(source_elements(gpu), dtype=dtype, device=device))


def shared_buffers(gpu: GpuSharing) -> Iterator[Buffer]:
    """Every buffer that training and rollout share."""
    for number, cluster in enumerate(gpu.clusters):
        for layer in range(cluster.train[0].count):
            yield Buffer(number, layer)


def locate_sources(gpu: GpuSharing, sources: Mapping[str, Tensor]) -> dict[Buffer, Tensor]:
    """The buffers that training's tensors are views of.

    Args:
        sources: by name; of a tied tensor one name is enough.
    Returns: [elements] by buffer, views of the tensors' storage.
    Raises: MissingWeight naming every tensor that is absent; LayoutMismatch if one does not lie as
        the plan says, or differs from the others in dtype or device.
    """
    found: list[tuple[Buffer, str, View, Tensor]] = []
    missing: list[str] = []
    for key, tensor, view in _source_views(gpu):
        names = tensor.layer_names(key.layer)
        given = next((name for name in names if name in sources), None)
        if given is None:
            missing.append(names[0])
        else:
            found.append((key, given, view, sources[given].detach()))
    if missing:
        raise missing_error(missing, "training")
    like = found[0][3]
    flats: dict[Buffer, Tensor] = {}
    for key, name, view, source in found:
        if source.dtype != like.dtype or source.device != like.device:
            raise LayoutMismatch(
                f"{name} is {source.dtype} on {source.device}; {found[0][1]} is {like.dtype} on "
                f"{like.device}"
            )
        if source.itemsize != gpu.element_bytes:
            raise LayoutMismatch(
                f"{name} has {source.itemsize} bytes an element; the plan counts with "
                f"{gpu.element_bytes}"
            )
        flat = _behind(name, source, view, gpu.clusters[key.cluster].storage_elements)
        if flats.setdefault(key, flat).data_ptr() != flat.data_ptr():
            raise LayoutMismatch(
                f"{name} does not lie beside the tensors that it shares a buffer with; "
                "allocate_sources lays them out"
            )
    return flats


def own_elements(gpu: GpuSharing) -> int:
    """Length of a flat buffer for what the rollout has of its own, which is what is rebuilt."""
    return _end(_own_sizes(gpu))


def own_in(gpu: GpuSharing, flat: Tensor) -> dict[Buffer, Tensor]:
    """The rollout's own buffers in a flat one of [own_elements(gpu)]."""
    return _carved(_own_sizes(gpu), flat)


def allocate_own(
    gpu: GpuSharing, *, dtype: torch.dtype, device: torch.device
) -> dict[Buffer, Tensor]:
    """As `own_in`, in a new buffer of zeros."""
    return own_in(gpu, torch.zeros(own_elements(gpu), dtype=dtype, device=device))


def target_tensors(gpu: GpuSharing, buffers: Mapping[Buffer, Tensor]) -> dict[str, Tensor]:
    """The rollout's tensors by name; their padding is set to zero.

    Args:
        buffers: all of the rank, shared ones and own ones.
    Returns: views of the buffers; tied tensors under each of their names.
    """
    targets: dict[str, Tensor] = {}
    for key in shared_buffers(gpu):
        for number, one in enumerate(gpu.clusters[key.cluster].rollout):
            place = key if one.view is not None else key._replace(own=number)
            flat, view = buffers[place], target_view(one)
            targets |= dict.fromkeys(one.tensor.layer_names(key.layer), strided(flat, view))
            for row, part in one.tensor.placed_parts():
                for box in minus_all([part.box], [] if part.real is None else [part.real]):
                    for region in regions(place, view, row, part, box):
                        strided(flat, region.view).zero_()
    return targets


def _source_views(gpu: GpuSharing) -> Iterator[tuple[Buffer, RankTensor, View]]:
    for key in shared_buffers(gpu):
        cluster = gpu.clusters[key.cluster]
        for tensor, view in zip(cluster.train, cluster.train_views, strict=True):
            yield key, tensor, view


def _source_sizes(gpu: GpuSharing) -> dict[Buffer, int]:
    return {key: gpu.clusters[key.cluster].storage_elements for key in shared_buffers(gpu)}


def _own_sizes(gpu: GpuSharing) -> dict[Buffer, int]:
    return {
        key._replace(own=number): one.tensor.numel
        for key in shared_buffers(gpu)
        for number, one in enumerate(gpu.clusters[key.cluster].rollout)
        if one.view is None
    }


def _carved(sizes: Mapping[Buffer, int], flat: Tensor) -> dict[Buffer, Tensor]:
    """Parts of a buffer, one after the other, each at an aligned place."""
    starts = itertools.accumulate(map(padded, sizes.values()), initial=0)
    return {
        key: flat.narrow(0, start, size)
        for (key, size), start in zip(sizes.items(), starts, strict=False)
    }


def _end(sizes: Mapping[Buffer, int]) -> int:
    return sum(map(padded, sizes.values()))


def _behind(name: str, source: Tensor, view: View, elements: int) -> Tensor:
    """The buffer of so many elements in which a tensor is this view."""
    lies = tuple(
        step for size, step in zip(source.shape, source.stride(), strict=True) if size != 1
    )
    wanted = tuple(step for size, step in zip(view.shape, view.strides, strict=True) if size != 1)
    start = source.storage_offset() - view.offset
    room = source.untyped_storage().nbytes() // source.itemsize
    if tuple(source.shape) != view.shape or lies != wanted or start < 0 or start + elements > room:
        raise LayoutMismatch(
            f"{name} is {tuple(source.shape)} with strides {source.stride()} at element "
            f"{source.storage_offset()} of {room}; the plan wants {view.shape} with strides "
            f"{view.strides} at element {view.offset} of a buffer of {elements}"
        )
    return source.as_strided((elements,), (1,), start)
