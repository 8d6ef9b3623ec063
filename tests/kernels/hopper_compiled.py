"""Compiles the Hopper kernels for compute capability 9.0, on any machine."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from foreshock.kernels.flash_attention.triton_kernels.hopper import DIM
from foreshock.kernels.flash_attention.triton_kernels.hopper_backward import hopper_backward_kernel, tiles
from foreshock.kernels.flash_attention.triton_kernels.hopper_forward import hopper_forward_kernel


def compiled(
    *, causal: bool, residual: bool, modes: bool, second: bool, tail: bool = False, dtype: str = "bf16"
) -> Any:
    """One version of the forward."""
    kind = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]

    def descriptor(rows: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, DIM], kind)
        return f"tensordesc<{dtype}[1, 1, {rows}, {DIM}],{layout!r}>"

    half, whole = descriptor(64), descriptor(128)
    constants = {"CAUSAL": causal, "TAIL": tail}
    signature: dict[str, Any] = {
        **dict(zip(("q_desc", "k_desc", "v_desc", "o_desc"), (half, whole, whole, half), strict=True)),
        "r_desc": half if residual else "constexpr",
        **dict.fromkeys(("lse", "row_max"), "*fp32"),
        "second": "*fp32" if second else "constexpr",
        "modes": "*i32" if modes else "constexpr",
        **dict.fromkeys(("blocks", "planes", "heads", "group", "length_q", "length_k", "tiles"), "i32"),
        **dict.fromkeys(("unit", "score_unit"), "fp32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    places = list(signature)
    optional = (("r_desc", residual), ("second", second), ("modes", modes))
    nothing = {name: None for name, given in optional if not given}
    fixed = {(places.index(name),): value for name, value in {**constants, **nothing}.items()}
    source = GluonASTSource(hopper_forward_kernel, signature, fixed, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def compiled_backward(*, causal: bool, tail: bool = False, dtype: str = "bf16", shared: bool = False) -> Any:
    """One version of the backward."""
    kinds = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
    words = [*[dtype] * 4, "bf16", "fp32", *["fp32" if shared else dtype] * 2]  # folded rows, dQ, then dK and dV
    names = hopper_backward_kernel.arg_names
    signature: dict[str, Any] = {}
    for place, (rows, columns) in tiles(shared=shared).items():
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], kinds[words[place]])
        signature[names[place]] = f"tensordesc<{words[place]}[1, 1, {rows}, {columns}],{layout!r}>"
    signature |= dict.fromkeys(("blocks", "planes", "section", "tiles", "heads", "group", "members"), "i32")
    signature |= dict.fromkeys(("unit", "scale"), "fp32")
    constants = {"CAUSAL": causal, "TAIL": tail, "SHARED": shared}
    signature |= dict.fromkeys(constants, "constexpr")
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(hopper_backward_kernel, signature, fixed, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
