"""Check that foreshock's kernels agree with PyTorch's attention before they compute the first call of a kind, and that
PyTorch's attention is correct on random inputs of a model's shapes before a run.

Random operands have the call's properties: type, numerics, head dim, grouped heads, causality, window, softcap, scale
and packing. Output and gradients of foreshock's kernels and of PyTorch's attention are compared with float64; the error
of foreshock's kernels may be a small multiple of PyTorch's. The training's operands, gradients and random generators
are not changed.
"""

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, cast

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foreshock.kernels.flash_attention import flash_attention, new_state
from foreshock.kernels.flash_attention.op import each_version
from foreshock.kernels.flash_attention.spec import CausalAlignment, Numerics, operand_dtype
from foreshock.monitor.model.discovery import SDPA

LENGTH: Final = 300
"""Number of queries and keys: several full tiles of every kernel, and a partial one."""
KEY_HEADS: Final = 2
ROWS: Final = 10
"""Number of adjacent rows of a head whose errors are compared together: few, so that a single wrong row is found."""
FACTOR: Final = 4.0
"""Allowed error of foreshock's kernels, as a multiple of the error of PyTorch's attention."""
ROUNDINGS: Final = {torch.float32: 16.0, torch.float64: 256.0}
"""Additionally allowed error in units of rounding; 2 for 16 bits. In float64, the reference is off by some dozens."""
_OFFSET: Final = 0.4
"""Mean of queries and keys, so that the scores of a head have an offset, as in a head that needs a mitigation."""

_NAMES: Final = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")


class Kind(NamedTuple):
    """Properties of calls that one self-check covers; only numbers and strings, so that a graph can contain them."""

    device: str
    dtype: str
    """Type of the operands after autocast, such as bfloat16."""
    numerics: Numerics
    head_dim: int
    group: int
    """Query heads per key head."""
    causal: CausalAlignment = "none"
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    packed: bool = False
    """Whether several sequences are concatenated in one row."""


UNCOMPARED: Final = "the step was captured in a CUDA graph before the kernels were checked; run one step without it"


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def why_not_proven(*kind: object) -> str | None:
    """Return how foreshock's kernels differ from PyTorch's attention in calls of `Kind(*kind)`, as a sentence; None if
    only by rounding. Computed once per process; in compiled code, during tracing."""
    asked = Kind(*kind)  # type: ignore[arg-type]
    if asked.numerics == "paper":  # chosen by the user for its errors
        return None
    if asked not in _compared:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return UNCOMPARED
        _compared[asked] = _compare(asked)
    return _compared[asked]


_compared: Final[dict[Kind, str | None]] = {}


def _compare(kind: Kind) -> str | None:
    outcome: list[str | None] = []

    def compare() -> None:
        try:
            outcome.append(difference(kind))
        except Exception as error:
            outcome.append(f"the check of foreshock's kernels failed: {type(error).__name__}: {str(error)[:200]}")

    # A new thread does not inherit the training thread's state: autocast, hooks on saved tensors (as from
    # checkpointing), dispatch modes, disabled gradients.
    thread = threading.Thread(target=compare, name="foreshock-self-check", daemon=True)
    thread.start()
    thread.join()
    return outcome[0]


def difference(kind: Kind) -> str | None:
    """Compute the result of `why_not_proven` for this kind, without a cache."""
    dtype: torch.dtype = getattr(torch, kind.dtype)
    dtype = operand_dtype(dtype) if kind.numerics in ("kernel", "paper") else dtype
    operands = _drawn(kind, dtype)
    with sdpa_kernel(SDPBackend.MATH):
        truth = _both_ways(_own(kind), *(x.double() for x in operands))
    theirs = _both_ways(_own(kind), *operands)
    unit = torch.finfo(dtype).eps / 2
    for _ in each_version(kind.head_dim, kind.group):
        mine = _both_ways(_ours(kind), *operands)
        for name, true, own, our in zip(_NAMES, truth, theirs, mine, strict=True):
            size, error_own, error_our = _norm(true), _norm(own.double() - true), _norm(our.double() - true)
            if not bool((error_our <= FACTOR * error_own + ROUNDINGS.get(dtype, 2.0) * unit * size).all()):
                return (
                    f"the {name} of foreshock's kernels is off by {_largest(error_our / size)}, that of PyTorch's "
                    f"attention by {_largest(error_own / size)} (relative to float64)"
                )
    return None


def _drawn(kind: Kind, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return random query, key, value and output gradient, [2, heads, LENGTH, head_dim] in a model's usual layout."""
    random = torch.Generator(kind.device).manual_seed(1)

    def draw(heads: int, mean: float) -> Tensor:
        shape = 1 if kind.packed else 2, LENGTH, heads, kind.head_dim
        return torch.randn(shape, generator=random, device=kind.device).add_(mean).to(dtype).transpose(1, 2)

    heads, usual = KEY_HEADS * kind.group, kind.head_dim**-0.5
    query, *others = draw(heads, _OFFSET), draw(KEY_HEADS, _OFFSET), draw(KEY_HEADS, 0.0), draw(heads, 0.0)
    # If a row attends to almost only one key, rounding errors differ between rows by more than FACTOR.
    return query * (usual / max(usual, abs(kind.scale or 0.0))), *others


_ENDS: Final = (0, LENGTH // 3, LENGTH)
"""Cumulative lengths of the packed sequences."""


def _ours(kind: Kind) -> Callable[..., Tensor]:
    heads = KEY_HEADS * kind.group
    # With state and modes, as in a watched layer; without them, other versions of the kernels would be launched.
    watched: dict[str, Any] = {
        "state": new_state(heads, kind.device),
        "modes": torch.zeros(heads, dtype=torch.int32, device=kind.device),
    }
    if kind.packed:
        ends = torch.tensor(_ENDS, dtype=torch.int32, device=kind.device)
        watched |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rule: dict[str, Any] = {"causal": kind.causal, "window": kind.window, "softcap": kind.softcap}
        out = flash_attention(query, key, value, **rule, scale=kind.scale, numerics=kind.numerics, **watched)
        return cast(Tensor, out)

    return ours


def _own(kind: Kind) -> Callable[..., Tensor]:
    """Return PyTorch's attention, or its formula if there is a softcap, which PyTorch's does not support."""
    visible = _visible(kind) if kind.packed or kind.window != (-1, -1) or kind.softcap else None

    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not kind.softcap:
            causal = visible is None and kind.causal != "none"
            return SDPA(query, key, value, visible, 0.0, causal, scale=kind.scale, enable_gqa=kind.group > 1)
        key, value = (x.repeat_interleave(kind.group, 1) for x in (key, value))
        scale = kind.head_dim**-0.5 if kind.scale is None else kind.scale
        scores = (query @ key.mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
        scores = (scores / kind.softcap).tanh() * kind.softcap
        return scores.masked_fill(~visible, -math.inf).softmax(-1).to(value.dtype) @ value  # type: ignore[operator]

    return own


def _visible(kind: Kind) -> Tensor:
    """Return which keys each query sees, bool [LENGTH, LENGTH]."""
    place = torch.arange(LENGTH, device=kind.device)
    distance = place - place.view(-1, 1)
    left, right = (side if side >= 0 else LENGTH for side in kind.window)
    visible = (distance >= -left) & (distance <= (right if kind.causal == "none" else 0))
    if kind.packed:
        second = place >= _ENDS[1]
        visible &= second == second.view(-1, 1)
    return visible


def _both_ways(attention: Callable[..., Tensor], *operands: Tensor) -> tuple[Tensor, ...]:
    """Return the output of `attention` and the gradients of query, key and value; operands: these, and the output's
    gradient."""
    leaves = [x.detach().requires_grad_() for x in operands[:3]]
    out = attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, operands[3].to(out.dtype))


def _norm(x: Tensor) -> Tensor:
    """Return the norm of each group of ROWS adjacent rows, [B, H, LENGTH / ROWS]."""
    norm: Tensor = x.double().reshape(*x.shape[:2], -1, ROWS * x.shape[3]).norm(dim=3)
    return norm


def _largest(share: Tensor) -> str:
    return f"{float(share.nan_to_num().max()):.2g}"


LENGTHS: Final = (1, 7, 129)
"""One key, fewer keys than in any tile, and one more than in some tiles."""
_OFF: Final = 16.0
"""Allowed error of a row in units of rounding, relative to the largest norm of a row of its head, at least 1."""


def wrong_attention(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> list[str]:
    """Return sentences about results of PyTorch's causal attention with these shapes that rounding does not explain."""
    found = []
    unit = max(torch.finfo(dtype).eps / 2, 2.0**-11)  # operands of float32 may be multiplied in TF32
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(length)
        shapes = [(2, count, length, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
        operands = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": heads != kv_heads}
        with sdpa_kernel(SDPBackend.MATH):
            truth = _both_ways(partial(SDPA, **options), *(x.double() for x in operands))
        given = _both_ways(partial(F.scaled_dot_product_attention, **options), *operands)
        for name, true, own in zip(_NAMES, truth, given, strict=True):
            bound = _OFF * unit * true.norm(dim=-1).amax(-1, keepdim=True).clamp(min=1.0)
            error = (own.double() - true).norm(dim=-1) / bound
            if not bool((error <= 1).all()):  # NaN too
                worst = float(error.nan_to_num(nan=math.inf).max())
                found.append(
                    f"its {name} is wrong at length {length}, up to {worst:.3g} times as far as rounding explains"
                )
    return found
