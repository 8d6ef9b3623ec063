"""The specification of one attention call, and the checks of its arguments."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

Numerics = Literal["float64", "float32", "kernel", "paper"]
"""How attention is rounded.

- float64: everything in float64; the reference for tests.
- float32: everything in float32; used for control runs.
- kernel: as a FlashAttention-2 kernel. Operands in bf16 or fp16; scores, row maximum, row sum and accumulator in fp32;
  P rounded to the operand dtype for P V and P^T dO, dS rounded for dS K and dS^T Q; O rounded once.
- paper: as the reference code of arXiv 2510.04212. Like kernel, but scores, row sum and O before its division are
  rounded to the operand dtype too.
"""

CausalAlignment = Literal["none", "top_left", "bottom_right"]
"""Where the causal diagonal starts if lengths differ: query i sees keys up to i (top_left, as in PyTorch's SDPA) or up
to i + Sk - Sq (bottom_right, as in FlashAttention)."""

Rounds = Literal["operands", "scores", "unknown"]
"""What the model's own attention rounds to its operands' type, in addition to its weights and its output: nothing
(operands), its scores, or unknown."""

NUMERICS: Final[tuple[str, ...]] = get_args(Numerics)
CAUSAL_ALIGNMENTS: Final[tuple[str, ...]] = get_args(CausalAlignment)
_INPUT_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


WIDEST: Final = 2**30
"""Lengths and window sides must be smaller than this: the sum of two has to fit the kernels' 32-bit indices."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Specification of one attention call, without its tensors.

    With off = Sk - Sq (0 under top_left alignment), query i sees the keys j with
    i + off - window_left <= j <= i + off + window_right, and j <= i + off when causal.
    """

    scale: float
    """Factor of the scores, usually 1 / sqrt(D)."""
    causal: CausalAlignment = "none"
    window_left: int = -1
    """Keys visible before the diagonal; -1, or WIDEST and more, means all."""
    window_right: int = -1
    """Keys visible after the diagonal; -1, or WIDEST and more, means all."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0 means off."""
    dropout_p: float = 0.0
    """Probability of dropping an entry of P."""
    numerics: Numerics = "kernel"
    residual: bool = True
    """Whether the rounding residual of O is stored; the backward needs it."""
    rounds: Rounds = "operands"
    """Only for the model's own attention, which is sampled: the rounding that the check of its output allows."""
    learned_bias: bool = False
    """Only for the model's own attention: whether its mask has a gradient. A number that a learned bias adds to a whole
    row counts as part of the score, because it may be a product with the query."""

    def __post_init__(self) -> None:
        if self.numerics not in NUMERICS:
            raise ValueError(f"numerics {self.numerics!r} does not exist; use one of {', '.join(NUMERICS)}")
        if self.causal not in CAUSAL_ALIGNMENTS:
            raise ValueError(f"causal {self.causal!r} is unknown; use True, False, {', '.join(CAUSAL_ALIGNMENTS)}")
        if not -math.inf < self.scale < math.inf:  # torch.compile can trace this even if the head dim is symbolic
            raise ValueError(f"scale is {self.scale}; give a finite number or None for 1 / sqrt(head_dim)")
        if min(self.window_left, self.window_right) < -1:
            window = (self.window_left, self.window_right)
            raise ValueError(f"window is {window}; give (left, right) in keys, each 0 or more, or -1 for unlimited")
        for side in ("window_left", "window_right"):
            if getattr(self, side) >= WIDEST:
                object.__setattr__(self, side, -1)
        if not 0 <= self.softcap < math.inf:
            raise ValueError(f"softcap is {self.softcap}; give a positive number, or 0 for none")
        if not 0 <= self.dropout_p < 1:
            raise ValueError(f"dropout_p is {self.dropout_p}; give a probability from 0 up to, not including, 1")

    @property
    def right(self) -> int:
        """Keys visible after the diagonal; -1 for all."""
        return self.window_right if self.causal == "none" else 0

    @property
    def text(self) -> str:
        """The fields in order, separated by spaces: the operators' argument `spec`.

        One argument costs PyTorch's dispatcher much less than ten. The last word is the number of the forward's
        outputs: PyTorch caches compiled graphs on disk by their arguments, and without it would load one that was
        compiled for an older version of the operator.
        """
        numbers = f"{self.scale} {self.causal} {self.window_left} {self.window_right} {self.softcap} {self.dropout_p}"
        return f"{numbers} {self.numerics} {self.residual:d} {self.rounds} {self.learned_bias:d} 5"


def constants(*numbers: float) -> tuple[float, ...]:
    """Turn `numbers`, which may be symbolic under torch.compile, into constants: a graph contains its call's spec."""
    if not torch.compiler.is_compiling():
        return numbers
    return tuple(float.fromhex(float(number).hex()) for number in numbers)


@lru_cache(maxsize=1024)
def spec_of(text: str) -> AttentionSpec:
    """Parse the `text` of a spec."""
    scale, causal, left, right, softcap, dropout_p, numerics, residual, rounds, learned, _ = text.split()
    return AttentionSpec(
        float(scale),
        cast(CausalAlignment, causal),
        int(left),
        int(right),
        float(softcap),
        float(dropout_p),
        cast(Numerics, numerics),
        residual == "1",
        cast(Rounds, rounds),
        learned == "1",
    )


@lru_cache(maxsize=1024)
def text_of(*fields: Any) -> str:
    """Return the `text` of a spec with these fields. Raises ValueError with a sentence for values that are invalid."""
    return AttentionSpec(*fields).text


class Arguments(NamedTuple):
    """Arguments of a call except query, key, value and state; `foreshock::attention_forward` describes them (op.py)."""

    modes: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    seed: Tensor | None
    spec: AttentionSpec


class Saved(NamedTuple):
    """Tensors that a forward saves for its backward; `foreshock::attention_forward` describes them (op.py)."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    residual: Tensor
    lse: Tensor
    row_max: Tensor
    second: Tensor


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the 16-bit type of the matrix products' operands: the input's type, or bf16 for wider inputs."""
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.bfloat16


def compute_dtype(numerics: Numerics) -> torch.dtype:
    """Return the type of scores, row maximum, row sum, accumulator and lse: float64 under float64, else float32."""
    return torch.float64 if numerics == "float64" else torch.float32


def residual_dtype(dtype: torch.dtype, numerics: Numerics) -> torch.dtype:
    """Return the type of O's saved rounding residual: 16 bits if O is rounded to 16 bits, else the compute dtype."""
    return operand_dtype(dtype) if numerics in ("kernel", "paper") else compute_dtype(numerics)


def residual_scale(dtype: torch.dtype) -> float:
    """Return the factor for O's rounding residual before it is stored in this dtype.

    In fp16, the residual of an O below about 1e-3 would underflow; multiplied by the inverse of fp16's relative step,
    it is about as large as O.
    """
    return 2.0**11 if dtype == torch.float16 else 1.0


def check_tensors(query: Tensor, key: Tensor, value: Tensor, numerics: Numerics) -> None:
    """Raise ValueError with a sentence unless query [B, H, Sq, D] and key, value [B, Hkv, Sk, D] are compatible."""
    if not query.dim() == key.dim() == value.dim() == 4:
        given = _shapes(query, key, value)
        raise ValueError(f"{given}: attention takes query [B, H, Sq, D] and key, value [B, Hkv, Sk, D]")
    if key.shape != value.shape:
        given = _shapes(query, key, value)
        raise ValueError(f"{given}: key and value must have the same shape [B, Hkv, Sk, D]")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or query.shape[3] == 0:
        raise ValueError(f"{_shapes(query, key, value)}: batch size and head dim (1 or more) must be equal")
    if query.shape[2] >= WIDEST or key.shape[2] >= WIDEST:
        raise ValueError(
            f"{_shapes(query, key, value)}: at most {WIDEST - 1} rows of queries and of keys are supported"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide into {kv_heads} key heads; give a multiple of {kv_heads}")
    dtypes = {query.dtype, key.dtype, value.dtype}
    if len(dtypes) > 1 or query.dtype not in _INPUT_DTYPES:
        names = ", ".join(sorted(str(d) for d in dtypes))
        raise ValueError(f"inputs are {names}; query, key, value must share one of bfloat16, float16, float32, float64")
    if query.dtype == torch.float64 and numerics != "float64":
        raise ValueError(f"float64 inputs need numerics='float64', got {numerics!r}; cast them or change the numerics")
    if not query.device == key.device == value.device:
        raise ValueError(f"inputs are on {query.device}, {key.device}, {value.device}; move them to one device")


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"


def check_packed(query: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    """Raise ValueError unless both or none of the cumulative lengths are given, each int32 [N + 1]."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError("only one of cu_seqlens_q and cu_seqlens_k was given; packed sequences need both")
    if query.shape[0] != 1:
        raise ValueError(f"packed sequences take tensors [1, H, total, D]; the batch size given is {query.shape[0]}")
    for name, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if (
            lengths.dtype != torch.int32
            or lengths.dim() != 1
            or lengths.shape != cu_seqlens_q.shape
            or not len(lengths)
        ):
            raise ValueError(
                f"{name} is {lengths.dtype} {list(lengths.shape)}; give int32 [N + 1], starting at 0, for N sequences"
            )
        if lengths.device != query.device:
            raise ValueError(f"{name} is on {lengths.device}; move it to {query.device}, the device of the query")
