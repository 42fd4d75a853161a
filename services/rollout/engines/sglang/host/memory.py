"""SGLang's memory saver, which releases memory by tag, and what must not be in its pools."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext


def outside_memory_saver() -> AbstractContextManager[None]:
    """Allocate in torch's own pool for a while, where SGLang would have the saver's.

    Memory that a model is made with is not used any more once its parameters are views of the
    policy's weights, and a pool of the saver's would keep it.
    """
    if "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
        return nullcontext()
    from torch_memory_saver import torch_memory_saver

    return torch_memory_saver.disable()
