"""Import-only stand-in for sgl_kernel: every name exists, none can be called."""

from torch import library as operators

_OPS = operators.Library("sgl_kernel", "FRAGMENT")
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_gdn_gating_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _OPS.define(f"{_name}(Tensor x) -> Tensor")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}")

    return missing
