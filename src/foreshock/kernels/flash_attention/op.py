"""The operators `foreshock::attention_forward` and `foreshock::attention_backward`, and the public `flash_attention`.

The forward is functional. The backward counts the statistics into the layer's state, so a recomputed forward or a
forward without backward does not count anything (docs/design.md, decision 1).
"""

import math
import os
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, Final, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from foreshock.contract.slots import SLOT_COUNT
from foreshock.kernels.flash_attention import reference, twice
from foreshock.kernels.flash_attention.spec import (
    Arguments,
    AttentionSpec,
    CausalAlignment,
    Numerics,
    Saved,
    check_packed,
    check_tensors,
    compute_dtype,
    constants,
    operand_dtype,
    residual_dtype,
    spec_of,
    text_of,
)


@cache
def _triton() -> Any:
    """Return the Triton kernels; None if they cannot be imported or FORESHOCK_KERNELS is "reference"."""
    asked = os.environ.get("FORESHOCK_KERNELS", "")
    if asked == "reference":
        return None
    if asked not in ("", "triton"):
        warnings.warn(
            f"FORESHOCK_KERNELS is {asked!r}; set it to 'triton' to avoid the kernels written for Hopper, or to "
            "'reference' to avoid all kernels; by default the fastest kernels run",
            stacklevel=2,
        )
    try:
        from foreshock.kernels.flash_attention.triton_kernels import backward, forward, hopper
    except ImportError as error:
        warnings.warn(f"foreshock's Triton kernels cannot be imported ({error}); attention is slow", stacklevel=2)
        return None
    return SimpleNamespace(
        attention_forward=forward.attention_forward,
        attention_backward=backward.attention_backward,
        each_version=hopper.each_version,
    )


def _kernels(query: Tensor, spec: AttentionSpec) -> Any:
    """Return the Triton kernels if they support this call, else None; they have the signatures of `reference`."""
    return _triton() if query.is_cuda and spec.numerics == "kernel" and _supports(query.device) else None


@cache
def _supports(device: torch.device) -> bool:
    """Whether the kernels run on this GPU. Cached, because PyTorch looks up the capability at each call."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def each_version(head_dim: int, group: int) -> Iterator[None]:
    """Loop over the versions of the kernels that support this head dim and number of query heads per key head.

    Inside the loop, calls use that version, whatever their length; for checks of the kernels.
    """
    kernels = _triton() if torch.cuda.is_available() and group > 1 else None
    if kernels is None:
        yield
    else:
        yield from kernels.each_version(head_dim, group)


def _attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    modes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_seed: Tensor | None,
    spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute attention of query [B, H, Sq, D] over key and value [B, Hkv, Sk, D] with any strides.

    Under `kernel` and `paper` numerics the inputs are bf16 or fp16. `state` is only passed on to the backward, which
    counts into it. `modes` is int32 [H] (foreshock.contract.modes.Mode), None for plain. `dropout_seed` is int64 [],
    None without dropout. Packed sequences are concatenated in [1, H, total, D], with cumulative lengths int32 [N + 1]
    and the longest length (or any upper bound of it); otherwise cumulative lengths are None and the lengths Sq and Sk.

    Returns five tensors. out is [B, H, Sq, D] in the query's layout and dtype. Its rounding residual has the same
    layout (dtype `residual_dtype`, multiplied by `residual_scale`), or is empty [0] if the spec does not store it.
    Log-sum-exp, largest score and second largest score are [B, H, Sq] (`compute_dtype`), -inf for a row that does not
    see any key. The kernels' backward finds ties by the second largest score; it is empty [0] if the backward does not
    count anything or no kernel supports the call.
    """
    packed = (_adjacent(cu_seqlens_q), _adjacent(cu_seqlens_k), max_seqlen_q, max_seqlen_k)
    given = Arguments(_adjacent(modes), *packed, dropout_seed, spec_of(spec))
    if (kernels := _kernels(query, given.spec)) is not None:  # the kernels write in the query's layout
        counted = state is not None
        out, residual, lse, row_max, second = kernels.attention_forward(query, key, value, given, counted=counted)
    else:
        with torch.autocast(query.device.type, enabled=False):  # products are rounded as the numerics say
            out, residual, lse, row_max, second = reference.attention_forward(query, key, value, given)
        if _keeps_second(query, state, given.spec):
            second = lse.new_full(lse.shape, -math.inf)  # nothing reads it
        out, residual = _laid_out(out, query), _laid_out(residual, query) if given.spec.residual else residual
    return out, residual, lse, row_max, second


def _keeps_second(query: Tensor, state: Tensor | None, spec: AttentionSpec) -> bool:
    """Whether the second largest scores are returned; decided without reading device memory, as a graph requires."""
    return state is not None and spec.residual and spec.numerics == "kernel" and query.is_cuda


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    spec = spec_of(arguments[6])
    rows, numerics, kept = query.shape[:-1], spec.numerics, residual_dtype(query.dtype, spec.numerics)
    return (
        torch.empty_like(query),
        torch.empty_like(query, dtype=kept) if spec.residual else query.new_empty(0, dtype=kept),
        query.new_empty(rows, dtype=compute_dtype(numerics)),
        query.new_empty(rows, dtype=compute_dtype(numerics)),
        query.new_empty(rows if _keeps_second(query, state, spec) else 0, dtype=compute_dtype(numerics)),
    )


def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    out_residual: Tensor,
    lse: Tensor,
    row_max: Tensor,
    second: Tensor,
    state: Tensor | None,
    modes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_seed: Tensor | None,
    spec: str,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, each in its layout and dtype; count the statistics into `state`.

    `state` is int64 [H, SLOT_COUNT] with any strides (foreshock.contract.slots); None disables the statistics.
    `grad_lse` is the gradient of the log-sum-exp [B, H, Sq]; None means zero.
    """
    saved = Saved(query, key, value, out, out_residual, lse, row_max, second)
    packed = (_adjacent(cu_seqlens_q), _adjacent(cu_seqlens_k), max_seqlen_q, max_seqlen_k)
    given = Arguments(_adjacent(modes), *packed, dropout_seed, spec_of(spec))
    if (kernels := _kernels(query, given.spec)) is not None:
        result: tuple[Tensor, Tensor, Tensor] = kernels.attention_backward(grad_out, saved, state, given, grad_lse)
        return result
    with torch.autocast(query.device.type, enabled=False):
        grads = reference.attention_backward(grad_out, saved, state, given, grad_lse)
    return _laid_out(grads[0], query), _laid_out(grads[1], key), _laid_out(grads[2], value)


def _fake_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _adjacent(numbers: Tensor | None) -> Tensor | None:
    """Return a short vector contiguous, as the kernels read it. The copy is a kernel of its own, so that a captured
    graph also sees flags that change between replays."""
    return None if numbers is None else numbers.contiguous()


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor` in the memory layout of `like`, so that a model that transposes its heads need not copy."""
    laid_out = torch.empty_like(like, dtype=tensor.dtype)
    return tensor if tensor.stride() == laid_out.stride() else laid_out.copy_(tensor)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, state, modes, cu_seqlens_q, cu_seqlens_k, _, _, dropout_seed, *_ = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens_q, cu_seqlens_k, dropout_seed)
    # State and modes change between forward and backward by design, but save_for_backward rejects changed tensors.
    ctx.state, ctx.modes = state, modes
    ctx.max_seqlens, ctx.spec = inputs[7:9], inputs[10]
    ctx.others = len(inputs) - 3
    # Only O and the log-sum-exp are differentiable; the backward gets None for the one that is not used.
    ctx.mark_non_differentiable(output[1], *output[3:])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Any, _: Any, grad_lse: Any, *__: Any, eager: bool = False
) -> tuple[Tensor | None, ...]:
    query, key, value, *output, cu_seqlens_q, cu_seqlens_k, dropout_seed = ctx.saved_tensors
    if grad_out is None:  # only the log-sum-exp was used
        grad_out = torch.zeros_like(query)
    grads: tuple[Tensor, ...]
    if not twice.is_asked(grad_out):
        state, ctx.state = ctx.state, None  # a second backward (retain_graph) must not count again
        given = (state, ctx.modes, cu_seqlens_q, cu_seqlens_k, *ctx.max_seqlens, dropout_seed, ctx.spec)
        unseen = eager and _unseen(grad_out, grad_lse, query, key, value, *given[:4])
        by: Callable[..., tuple[Tensor, ...]] = _attention_backward if unseen else attention_backward
        grads = by(grad_out, query, key, value, *output, *given, grad_lse)
    else:  # does not count: a later backward of the same graph does, as the loss's after a gradient penalty's
        spec, packed = spec_of(ctx.spec), cu_seqlens_q is not None
        grads = twice.differentiable_gradients(grad_out, grad_lse, query, key, value, spec, packed=packed)
    needed = (grad if need else None for grad, need in zip(grads, ctx.needs_input_grad[:3], strict=True))
    return (*needed, *[None] * ctx.others)


_LIBRARY: Final = torch.library.Library("foreshock", "FRAGMENT")  # type: ignore[no-untyped-call]


def _operator(function: Callable[..., Any], fake: Callable[..., Any], mutates: tuple[str, ...]) -> Any:
    """Define the operator foreshock::`function`.

    torch.library.custom_op would do the same, but at every call it inspects all arguments in Python and compares every
    output with every input, which takes longer than a small attention.
    """
    name = function.__name__.removeprefix("_")
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    opaque = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, opaque, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"foreshock::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.foreshock, name).default


attention_forward: Any = _operator(_attention_forward, _fake_forward, ())
attention_backward: Any = _operator(_attention_backward, _fake_backward, ("state",))
torch.library.register_autograd("foreshock::attention_forward", _backward, setup_context=_setup_context, lib=_LIBRARY)


class _Attention(torch.autograd.Function):
    """The operators under eager autograd.

    The autograd function that torch.library generates does the same, but fills in default arguments in Python at every
    call, which takes longer than the kernels' launches. PyTorch's dispatcher takes longer too, so it is bypassed if no
    transform, mode or profiler would see the call.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output: tuple[Tensor, ...]
        if _unseen(*inputs[:7]):
            with torch._C.DisableTorchFunction():  # otherwise a default device would apply to the kernels' allocations
                output = _attention_forward(*inputs)
        else:
            output = attention_forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads, eager=True)


def _unseen(*tensors: Tensor | None) -> bool:
    """Whether PyTorch's dispatcher would call the operator's function directly with these tensors.

    True if no transform, tracer, profiler or mode (such as selective checkpointing's) is active, and every tensor is a
    plain torch.Tensor with memory and without a lazy negation. A default device is a mode too, but is allowed.
    """
    torch_c = torch._C
    modes = (torch_c._get_function_stack_at(at) for at in range(torch_c._len_torch_function_stack()))
    if torch_c._autograd._profiler_enabled() or any(type(mode) is not DeviceContext for mode in modes):
        return False
    if torch_c._dispatch_tls_local_include_set().raw_repr() & ~_ALWAYS:
        return False
    return all(
        tensor is None
        or (tensor.__class__ is Tensor and not (tensor.is_neg() or tensor._is_zerotensor() or tensor.is_meta))
        for tensor in tensors
    )


_KEYS: Final = torch._C.DispatchKeySet
_ALWAYS: Final[int] = (
    _KEYS(torch._C.DispatchKey.BackendSelect) | _KEYS(torch._C.DispatchKey.ADInplaceOrView)
).raw_repr()
"""The keys of PyTorch's dispatcher that every call includes. Each transform, mode and tracer includes one more."""


def attend(*inputs: Any) -> tuple[Tensor, ...]:
    """Call `attention_forward`, with its backward, on the fastest path."""
    result: tuple[Tensor, ...]
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        result = attention_forward(*inputs)  # a graph contains the operator
    else:
        result = _Attention.apply(*inputs)  # type: ignore[no-untyped-call]
    return result


class _Options(TypedDict, total=False):
    """Keyword arguments of `flash_attention`, for its two overloads."""

    causal: bool | CausalAlignment
    scale: float | None
    softcap: float
    window: tuple[int, int]
    dropout_p: float
    numerics: Numerics
    state: Tensor | None
    modes: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    attn_mask: None


@overload
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...
@overload
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool | CausalAlignment = False,
    scale: float | None = None,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    dropout_p: float = 0.0,
    numerics: Numerics = "kernel",
    state: Tensor | None = None,
    modes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    attn_mask: None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale Q K^T) V; the backward counts statistics per head.

    query is [B, H, Sq, D]; key and value are [B, Hkv, Sk, D], H a multiple of Hkv; bf16, fp16 or fp32 (float64 under
    float64 numerics). Under `kernel` and `paper` numerics fp32 inputs are rounded to bf16 first. Output and gradients
    have the inputs' dtype. Under autocast fp32 inputs take autocast's dtype, as in PyTorch's own attention.

    causal: True needs Sq = Sk; otherwise name the alignment, "top_left" or "bottom_right" (`CausalAlignment`).
    window: (left, right) keys visible next to the diagonal, -1 for all. softcap: 0 for off. scale: 1 / sqrt(D) if None.
    state: int64 [H, SLOT_COUNT] that the backward adds to (`new_state`); None disables the statistics.
    modes: int32 [H], foreshock.contract.modes.Mode; None means plain.
    cu_seqlens_q, cu_seqlens_k: cumulative lengths int32 [N + 1] of sequences concatenated in [1, H, total, D].
    max_seqlen_q, max_seqlen_k: length of the longest sequence; if None, it is read from the device, which waits for the
    device. Rows after a length that is too small are NaN (if the lengths are on a CPU, ValueError is raised).
    return_lse: also return the log-sum-exp [B, H, Sq], in nats; it can be differentiated once.
    On Hopper at head dim 128, the order in which dQ is summed varies, and so do its last bits; under
    torch.use_deterministic_algorithms(True) equal inputs give equal bits.
    On a GPU, a NaN or infinity in a key or value reaches every row that multiplies its tile, even if it is masked.
    Raises ValueError with a sentence for invalid arguments and for additive masks.
    Source: FlashAttention-2 (arXiv 2307.08691, algorithms 1 and 2); the statistics are those of arXiv 2510.04212,
    section 3, as defined in this folder's README.md.
    """
    if attn_mask is not None:
        raise ValueError(
            "attn_mask (an additive bias or mask) is not supported; use causal, window or cu_seqlens instead"
        )
    if not query.is_meta and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) if x.dtype == torch.float32 else x for x in (query, key, value))
    check_tensors(query, key, value, numerics)
    check_packed(query, cu_seqlens_q, cu_seqlens_k)
    _check_state(query, state, modes)
    if isinstance(causal, bool):
        if causal and (query.shape[2] != key.shape[2] or cu_seqlens_q is not cu_seqlens_k):
            raise ValueError(
                f"causal=True is ambiguous when lengths differ ({query.shape[2]} queries, {key.shape[2]} keys); "
                "use 'top_left' (PyTorch's SDPA) or 'bottom_right' (FlashAttention)"
            )
        causal = "top_left" if causal else "none"
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else float(scale)
    kept = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if torch.compiler.is_compiling():
        scale, softcap, dropout_p = constants(scale, softcap, dropout_p)
        window = int(window[0]), int(window[1])
        text = AttentionSpec(scale, causal, *window, softcap, dropout_p, numerics, kept).text
    else:
        text = text_of(scale, causal, *window, softcap, dropout_p, numerics, kept)  # validates the values
    # The seed is a tensor, so drawing it does not synchronise with the host; a recomputed forward draws the same one.
    seed = torch.randint(2**63 - 1, (), device=query.device) if dropout_p > 0 else None
    dtype = query.dtype
    if numerics in ("kernel", "paper") and dtype != (operand := operand_dtype(dtype)):
        query, key, value = query.to(operand), key.to(operand), value.to(operand)
    out, _, lse, *_ = attend(
        query,
        key,
        value,
        state,
        modes,
        cu_seqlens_q,
        cu_seqlens_k,
        _longest(query, cu_seqlens_q, max_seqlen_q, "max_seqlen_q"),
        _longest(key, cu_seqlens_k, max_seqlen_k, "max_seqlen_k"),
        seed,
        text,
    )
    out = out if out.dtype == dtype else out.to(dtype)
    return (out, lse) if return_lse else out


def _longest(rows: Tensor, cu_seqlens: Tensor | None, given: int | None, name: str) -> int:
    """Return the length of the longest packed sequence, or an upper bound of it.

    Reading the length waits for the device. That is not possible while a graph is compiled or captured: the total
    length is then used as a bound, which is slow, so pass max_seqlen.
    """
    if cu_seqlens is None:
        return rows.shape[2] if given is None else given
    if given is not None and (cu_seqlens.is_cuda or torch.compiler.is_compiling()):
        return given
    known = not torch.compiler.is_compiling() and not (rows.is_cuda and torch.cuda.is_current_stream_capturing())
    if len(cu_seqlens) < 2 or not known or rows.is_meta:
        return rows.shape[2]
    longest = int(cu_seqlens.diff().amax())
    if given is not None and given < longest:
        raise ValueError(f"{name} is {given}, but the longest sequence has {longest} rows; pass at least that, or None")
    return longest if given is None else given


def _check_state(query: Tensor, state: Tensor | None, modes: Tensor | None) -> None:
    heads = query.shape[1]
    if state is not None and (state.dtype != torch.int64 or state.shape != (heads, SLOT_COUNT)):
        raise ValueError(f"state is {state.dtype} {list(state.shape)}; give int64 [{heads}, {SLOT_COUNT}] (new_state)")
    if modes is not None and (modes.dtype != torch.int32 or modes.shape != (heads,)):
        raise ValueError(f"modes is {modes.dtype} {list(modes.shape)}; give int32 [{heads}], one flag per head")
    for name, tensor in (("state", state), ("modes", modes)):
        if tensor is not None and tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}; move it to {query.device}, the device of the query")
