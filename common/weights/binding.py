"""Parameters of a model as views of flat storage that somebody else owns.

Shapes: E = `total_elements` of a layout, Et = its `trainable_elements`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.weights.errors import LayoutMismatch, UnexpectedWeight, shown
from common.weights.layout import TensorEntry, WeightLayout, missing_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def torch_dtype(layout: WeightLayout) -> torch.dtype:
    """The dtype of the layout's compute weights.

    Raises: LayoutMismatch if torch has no floating dtype of that name.
    """
    dtype = getattr(torch, layout.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise LayoutMismatch(f"dtype {layout.dtype!r} is no floating dtype of torch")
    return dtype


def views(
    flat: Tensor, layout: WeightLayout, names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """The named parts of a flat buffer.

    Args:
        flat: [E] or [Et], any dtype and device; with Et only trainable entries have a part.
        layout: where the parts lie.
        names: which parts; all that `flat` has, if not given. Aliases are allowed.
    Returns: views of `flat` by name, in the order of offsets or of `names`.
    Raises: LayoutMismatch if `flat` has another length or lacks a named part.
    """
    if flat.dim() != 1 or flat.numel() not in {layout.total_elements, layout.trainable_elements}:
        raise LayoutMismatch(
            f"a flat buffer of shape {tuple(flat.shape)} does not fit a layout of "
            f"{layout.total_elements} elements, {layout.trainable_elements} of them trainable"
        )
    length = flat.numel()
    if names is None:
        chosen = {entry.name: entry for entry in layout.entries if entry.offset_elements < length}
    else:
        chosen = layout.select(names)
    for name, entry in chosen.items():
        if entry.offset_elements + entry.numel > length:
            raise LayoutMismatch(
                f"{name} is frozen: a buffer of trainable state has no part for it"
            )
    return {name: _view(flat, entry) for name, entry in chosen.items()}


def bind_parameters(
    model: nn.Module,
    layout: WeightLayout,
    flat_weights: Tensor,
    flat_gradients: Tensor | None,
) -> None:
    """Make every parameter of the model a view of shared storage.

    With an accumulator, trainable parameters require a gradient and their ``.grad`` is a view of
    it, in its dtype: a backward then adds in place, in the accumulator's precision. Never set
    ``.grad`` to None afterwards; zero the accumulator instead. Without one, nothing requires a
    gradient. A parameter that is a DTensor stays one; the layout and the buffers are the rank's.

    Args:
        model: its parameters may be on the meta device; they are replaced.
        layout: must cover exactly the model's parameters.
        flat_weights: [E].
        flat_gradients: [Et] of any floating dtype on the same device, or None.
    Raises: MissingWeight or UnexpectedWeight naming the parameters; LayoutMismatch for shapes.
    """
    weights = views(flat_weights, layout)
    if len(weights) != len(layout.entries):
        raise LayoutMismatch("the weights' buffer has room for the trainable entries only")
    gradients: dict[str, Tensor] = {}
    if flat_gradients is not None:
        gradients = views(flat_gradients, layout, [e.name for e in layout.trainable_entries])
    bind_tensors(model, layout, weights, gradients)


def bind_tensors(
    model: nn.Module,
    layout: WeightLayout,
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
) -> None:
    """Make every parameter of the model one of these tensors, wherever each of them lies.

    Args:
        layout: must cover exactly the model's parameters; its offsets do not matter.
        weights: by the names of the layout's entries; others may be there too.
        gradients: accumulators as for `bind_parameters`, of what trains.
    Raises: as `bind_parameters`; MissingWeight also for entries without a tensor.
    """
    owners = _parameter_owners(model)
    known = set(layout.names) | set(layout.aliases)
    if missing := sorted(set(owners) - known):
        raise missing_error(missing, "the layout")
    if extra := sorted(known - set(owners)):
        raise UnexpectedWeight(f"the model has no parameter for: {shown(extra)}", names=extra)
    if missing := sorted(set(layout.names) - weights.keys()):
        raise missing_error(missing, "what was given")
    parameters: dict[str, nn.Parameter] = {}
    for name in layout.names:
        weight = weights[name]
        module, leaf = owners[name]
        old = getattr(module, leaf)
        if (shape := tuple(local_part(old).shape)) != tuple(weight.shape):
            raise LayoutMismatch(f"{name} is {shape} in the model and {tuple(weight.shape)} here")
        parameters[name] = _parameter(old, weight, gradients.get(name))
    for name, (module, leaf) in owners.items():
        setattr(module, leaf, parameters[layout.aliases.get(name, name)])


def _view(flat: Tensor, entry: TensorEntry) -> Tensor:
    return flat.narrow(0, entry.offset_elements, entry.numel).view(entry.shape)


def _parameter_owners(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Each parameter's name, tied ones under all their names, to the module that holds it."""
    owners: dict[str, tuple[nn.Module, str]] = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            assert parameter is not None
            owners[f"{prefix}.{leaf}" if prefix else leaf] = (module, leaf)
    return owners


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, without a copy; of an ordinary tensor, all of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _parameter(old: Tensor, weight: Tensor, gradient: Tensor | None) -> nn.Parameter:
    parameter = nn.Parameter(_placed_like(old, weight), requires_grad=gradient is not None)
    if gradient is not None:
        # autograd casts each contribution to the accumulator's dtype before it adds
        parameter.grad_dtype = gradient.dtype
        parameter.grad = _placed_like(old, gradient)
    return parameter


def _placed_like(old: Tensor, local: Tensor) -> Tensor:
    """The rank's part of a distributed parameter, without a copy; else the tensor itself."""
    if not isinstance(old, DTensor):
        return local
    return DTensor.from_local(local, old.device_mesh, old.placements, run_check=False)
