"""Float64 all the way, for verification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class KeepFloat64(TorchDispatchMode):
    """A context in which casts from float64 to float32 keep float64, in forward and backward.

    The library's norms and its vision rotary step compute in float32 whatever the model's dtype.
    A rounded sum over responses is not the sum of rounded parts, so in float64 two exact passes
    would still differ by 1e-7. The model and its code stay as they are; only the casts are void.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator; for such a cast, a copy instead."""
        arguments = dict(kwargs or {})
        casts = func is torch.ops.aten._to_copy.default and arguments.get("dtype") == torch.float32
        if casts and args[0].dtype == torch.float64:
            return args[0].clone()
        return func(*args, **arguments)
