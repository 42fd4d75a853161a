"""A client of the node's MPS whose kernel writes where there is no memory."""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def _write_far_away(pointer, far: tl.constexpr) -> None:
    tl.store(pointer + far, 1.0)


def main() -> None:
    """Returns once the fault has come back; this process's context is lost then."""
    here = torch.zeros(1, device="cuda")
    _write_far_away[(1,)](here, 1 << 44)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(error)  # noqa: T201 - for the test's report
        sys.stdout.flush()
        return
    sys.exit("the write has done no harm")


if __name__ == "__main__":
    main()
