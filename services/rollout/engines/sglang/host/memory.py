"""SGLang's memory saver, which releases memory by tag: it is for keys and values only here.

Memory that a model is made with is free once its parameters are views of the policy's weights. A
pool of the saver's would keep it; torch's own does not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.utils.torch_memory_saver_adapter import _TorchMemorySaverAdapterReal


def keep_weights_out() -> None:
    """Have the models of this process made in torch's own memory. Once."""
    region = _TorchMemorySaverAdapterReal.region

    def without_weights(self: Any, tag: str, *args: Any, **kwargs: Any) -> AbstractContextManager:
        if tag == GPU_MEMORY_TYPE_WEIGHTS:
            return nullcontext()
        return region(self, tag, *args, **kwargs)

    _TorchMemorySaverAdapterReal.region = without_weights
