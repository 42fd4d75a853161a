"""Kernels that are launched before their predecessor has ended (programmatic dependent launch).

An early kernel may do nothing that depends on a predecessor, and write nothing, before
`take_turn`; every program of it has to call that first, also one with nothing to do, because the
kernels after it rely on it for the end of the kernels before it.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: ANN001, ANN201 - Triton types the arguments of its kernels
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launch_options(*, early: bool) -> dict[str, bool]:
    """What such a kernel is launched with."""
    return {"launch_pdl": True} if early else {}


@triton.jit
def take_turn(EARLY: tl.constexpr):
    """Let the next kernel be launched, and wait for the end of the ones before."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Bring the lines of these addresses into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
