"""Measures a sample of rows of an attention that somebody else computes: `attach(model, attention="keep")`.

The user's kernel stays in place. An identity on its output hands the output's gradient to `foreshock::probe_rows` in
the backward, where a few rows are computed again from q and k (scores in fp32) and v (their output unrounded), and
the same statistics are counted into the same state as our own kernels count of every row. Rows are drawn on the device,
each one alone and with equal chance: shares and means are unbiased, and their standard errors are those of independent
draws. A step that is not sampled costs one call of an operator that does nothing.
"""

import itertools
import logging
import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, cast

import torch
from torch import Tensor

from foreshock.kernels.flash_attention import AttentionSpec
from foreshock.kernels.flash_attention.spec import CausalAlignment, Numerics, constants, spec_of
from foreshock.monitor.attention.probed_rows import Call, measure
from foreshock.monitor.attention.proof import Proof

logger: Final = logging.getLogger("foreshock")

_TICK_BITS: Final = 40
"""Of a layer's counter below its number."""


@dataclass(slots=True)
class Sampling:
    """How much one agent samples; `due` says whether the running step is measured."""

    rows: int
    heads: int
    """heads of each layer, in turn; 0 for all"""
    due: bool = True
    captured: bool = False
    """A CUDA graph was captured: each of its replays is measured, and nothing in it changes until it is made anew."""
    strict: bool = False
    fault: str | None = None
    """Why this agent measures nothing any more: the training goes on without it."""
    proofs: dict[int, Proof] = field(default_factory=dict)
    """By the layer's place among its agent's: whether our kernels were proven for it; empty when nothing is open."""


_samplings: Final[dict[str, Sampling]] = {}
"""By key: a compiled graph hands tensors and words to an operator, not objects. A number it might take for a length."""
_numbers: Final = itertools.count(1)


def start_sampling(sampling: Sampling) -> str:
    """A key by which calls of `probe` find `sampling`."""
    key = str(next(_numbers))
    _samplings[key] = sampling
    return key


def stop_sampling(key: str) -> None:
    """Calls that still carry `key` measure nothing."""
    _samplings.pop(key, None)


def refuse_proof(key: str, tick: Tensor, reason: str) -> None:
    """The layer of `tick` does what our kernels would not let it do: it is not proven any more."""
    sampling = _samplings.get(key)
    if sampling is not None and (proof := _open_proof(sampling, tick)) is not None:
        proof.reason = reason


def _open_proof(sampling: Sampling, tick: Tensor) -> Proof | None:
    """The proof of the layer whose counter this is: its upper bits, for the counter may be a copy. Waits for the
    device, in the few steps that prove."""
    return sampling.proofs.get(int(tick) >> _TICK_BITS) if sampling.proofs else None


def probe(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    tick: Tensor,
    sampling: str,
    *,
    mask: Tensor | None = None,
    causal: CausalAlignment = "none",
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    numerics: Numerics = "kernel",
    provable: bool = False,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`out` [..., H, Sq, D], whose backward measures rows of the attention that gave it.

    query [..., H, Sq, D]; key, value [..., Hkv, Sk, D]; mask as PyTorch's attn_mask, bool or added to the scores,
    broadcast to [..., H, Sq, Sk]. state int64 [H, SLOT_COUNT] and tick int64 [1], which each measurement moves on, are
    written.
    sampling: what start_sampling gave. provable: it is a call of PyTorch's scaled_dot_product_attention that our
    kernels would serve, and may be compared with them. cu_seqlens: where the sequences of queries and of keys begin
    that are packed into one row (B = 1), each int32 [N + 1].
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    scale, softcap, dropout_p = constants(scale, softcap, dropout_p)
    options = (sampling, AttentionSpec(scale, causal, *window, softcap, dropout_p, numerics).text, provable)
    packed = cu_seqlens or (None, None)
    probed = cast(Tensor, _Probed.apply(out, query, key, value, mask, *packed, state, tick, options))  # type: ignore[no-untyped-call]
    return cast(Tensor, _writable(probed))


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator, unused-ignore]
def _writable(probed: Tensor) -> Tensor:
    """Let the model write into what its attention gave it. PyTorch refuses that of a view that a Function returned,
    since the Function's backward is left out then; ours may be: it changes no gradient."""
    if probed._is_view():
        torch._C._autograd._set_creation_meta(probed, torch._C._autograd.CreationMeta.DEFAULT)
    return probed


class _Probed(torch.autograd.Function):
    """The identity. Its tensors are saved as any other's are, so that checkpointing may recompute them."""

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        cu_queries: Tensor | None,
        cu_keys: Tensor | None,
        state: Tensor,
        tick: Tensor,
        options: tuple[Any, ...],
    ) -> Tensor:
        ctx.save_for_backward(out, query, key, value, mask, cu_queries, cu_keys)
        ctx.state, ctx.tick, ctx.options = state, tick, options
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors if torch.compiler.is_compiling() else _still_as_they_were(ctx, grad_out)
        if saved is not None:
            with torch.no_grad():  # a backward that is differentiated itself differentiates the identity alone
                _operator(grad_out, *saved, ctx.state, ctx.tick, *ctx.options)
        return grad_out, *[None] * 9


def _still_as_they_were(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...] | None:
    """What the forward saved; None where there is nothing to measure: many gradients are taken at once, or the model
    wrote into one of them since, as it may where its own attention did not save it."""
    which = ctx.options[0], ctx.tick
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(grad_out) or functorch.is_legacy_batchedtensor(grad_out):
        refuse_proof(*which, "many gradients of it are taken at once, which our kernels do not")
        return None
    if torch.is_grad_enabled():
        refuse_proof(*which, "its gradient is differentiated again, which our kernels' is not")
    try:
        return cast(tuple[Tensor, ...], ctx.saved_tensors)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        refuse_proof(*which, "the model writes into its operands or its output afterwards")
        return None


# Defined by hand: torch.library.custom_op wraps its Python in some 300 microseconds more of it, in every call.
_library: Final = torch.library.Library("foreshock", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "probe_rows(Tensor grad_out, Tensor out, Tensor query, Tensor key, Tensor value, Tensor? mask, "
    "Tensor? cu_queries, Tensor? cu_keys, Tensor(a!) state, Tensor(b!) tick, str sampling_key, str spec_text, "
    "bool provable) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def probe_rows(
    grad_out: Tensor,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    cu_queries: Tensor | None,
    cu_keys: Tensor | None,
    state: Tensor,
    tick: Tensor,
    sampling_key: str,
    spec_text: str,
    provable: bool,
) -> None:
    """Counts the statistics of sampled rows into `state` where its agent samples this step. Never waits for the device.

    While a CUDA graph is captured every step is measured, since what is captured is what each replay does.
    """
    sampling = _samplings.get(sampling_key)
    if sampling is None or sampling.fault or not query.numel() or not key.numel():
        return
    capturing = query.is_cuda and torch.cuda.is_current_stream_capturing()
    sampling.captured |= capturing
    if not (sampling.due or capturing):
        return
    spec = spec_of(spec_text)
    call = Call(grad_out, out, query, key, value, mask, cu_queries, cu_keys)
    try:
        with torch.autocast(query.device.type, enabled=False):
            if provable and not capturing and (proof := _open_proof(sampling, tick)) is not None:
                proof.compare(grad_out, out, query, key, value, spec)
            _sample(sampling, call.batched(), state, tick, spec)
    except Exception as error:
        if sampling.strict:
            raise
        sampling.fault = f"{type(error).__name__}: {str(error)[:300]}"
        logger.warning("foreshock: the probe is off from now on, training goes on: %s", sampling.fault)


_library.impl("probe_rows", probe_rows, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("foreshock::probe_rows", lambda *arguments: None, lib=_library)
_operator: Final = torch.ops.foreshock.probe_rows.default


@cache
def _kernels() -> Any:
    """The Triton kernels, or None where there are none."""
    try:
        from foreshock.kernels.flash_attention import sampled_rows
    except ImportError:
        return None
    return sampled_rows


def _sample(sampling: Sampling, call: Call, state: Tensor, tick: Tensor, spec: AttentionSpec) -> None:
    heads = state.shape[0]
    kernels = _kernels() if call.query.is_cuda and call.mask is None and call.cu_queries is None else None
    if kernels is not None and kernels.serves(call.query, call.key, call.value, call.out, spec):
        chosen = sampling.heads if 0 < sampling.heads < heads else heads
        kernels.count_sampled_rows(*call[:5], state, tick, sampling.rows, chosen, spec)
        return
    if 0 < sampling.heads < heads:
        index = (tick * sampling.heads + torch.arange(sampling.heads, device=tick.device)) % heads
        part = state[index]
        measure(sampling.rows, index, call, part, tick, spec)
        state[index] = part
    else:
        measure(sampling.rows, torch.arange(heads, device=tick.device), call, state, tick, spec)
    tick += 1


def new_ticks(layers: int, device: torch.device) -> Tensor:
    """A counter for each layer, int64 [layers, 1], far apart, so that no two layers draw the same rows."""
    return (torch.arange(layers, dtype=torch.int64) << _TICK_BITS).view(-1, 1).to(device)
