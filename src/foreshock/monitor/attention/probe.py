"""Measures a sample of rows of an attention that somebody else computes: `attach(model, attention="keep")`.

The user's kernel stays in place. An identity on its output hands the output's gradient to `foreshock::probe_rows` in
the backward, where a few rows are computed again from q and k (scores in fp32) and v (their output unrounded), and
the same statistics are counted into the same state as our own kernels count of every row. Rows are drawn on the device,
spread over the batch and its sequences and each with equal chance: shares and means are unbiased. A step that is not
sampled costs one call of an operator that does nothing.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, cast

import torch
from torch import Tensor

from foreshock.kernels.flash_attention import AttentionSpec
from foreshock.kernels.flash_attention.spec import CausalAlignment, Numerics, Rounds, constants, spec_of
from foreshock.monitor.attention.gradient_rows import GradientCheck
from foreshock.monitor.attention.probed_rows import (
    Call,
    ScoreMod,
    Scores,
    UnmeasurableError,
    measure,
    raise_largest,
    sampled_scores,
    sizes,
)
from foreshock.monitor.guard import logger

_TICK_BITS: Final = 40
"""Of a layer's counter below its number."""


@dataclass(slots=True)
class Sampling:
    """How much one agent samples; `due` says whether the running step is measured."""

    rows: int
    every_steps: int = 1
    """Steps from one that is measured to the next. A step that is captured in a CUDA graph measures this many times
    fewer rows, since each of its replays is measured."""
    due: bool = True
    gradients: bool = True
    """Rows of the gradients are compared in the running step, if it is measured."""
    in_full: bool = False
    """The scores of all rows of the running step are computed, for the largest of each head."""
    captured: bool = False
    """A CUDA graph was captured: each of its replays is measured, and nothing in it changes until it is made anew."""
    strict: bool = False
    fault: str | None = None
    """Why this agent measures nothing any more: the training continues without it."""
    refused: dict[int, str] = field(default_factory=dict)
    """By where a layer's state lies: what the model does with the attention that our kernels would not let it do."""
    outputs: "OutputSums | None" = None
    """Shows the layer whose output broke first, in steps that are not measured too."""


class OutputSums:
    """Sums of some numbers of each layer's output in each of the last steps: not finite if the output is not.

    One feature shows all, since what is not finite reaches every feature in the next product with a weight; and every
    fourth row shows all, since it reaches the rows behind it. A layer is known by where its state is.
    """

    def __init__(self, states: Sequence[Tensor]) -> None:
        self._places: Final = {state.data_ptr(): place for place, state in enumerate(states)}
        self._device: Final = states[0].device if states else torch.device("cpu")
        self._running: list[int] = []
        self._of_steps: Final[dict[int, tuple[list[int], Tensor]]] = {}
        self._make_room(_CALLS_AT_FIRST * len(states))

    def _make_room(self, calls: int) -> None:
        # Made outside the step: what is made inside it belongs to the pool of torch.compile's CUDA graphs, which
        # permits no tensor there to be kept.
        self._sums = torch.zeros(min(calls, _MOST_CALLS), device=self._device)
        self._each = self._sums.unbind()

    def add(self, state: Tensor, out: Tensor) -> None:
        """A layer gave `out` [..., S, D] in the running step."""
        place, count = self._places.get(state.data_ptr()), len(self._running)
        if place is not None and type(out) is Tensor and count < _MOST_CALLS:
            self._running.append(place)
            if count < len(self._each):
                rows = out[..., (out.shape[-2] - 1) % 4 :: 4, 0]
                # In two parts: PyTorch adds up strided numbers to one in a single block of threads. For GPT-2 small it
                # took 62 us a layer on an H100, most of what a step without a sample costs.
                parts = rows.sum(-1, dtype=torch.float32)
                torch.sum(parts, dim=tuple(range(parts.dim())), out=self._each[count])

    def end(self, step: int) -> None:
        """The running step is over, and was `step`."""
        places, self._running = self._running, []
        if places:
            self._of_steps[step] = places[: len(self._each)], self._sums[: len(places)].clone()
            if len(self._each) < min(len(places), _MOST_CALLS):
                self._make_room(len(places))
        if len(self._of_steps) > _MOST_STEPS:
            del self._of_steps[next(iter(self._of_steps))]

    def broken_at(self, step: int) -> list[tuple[int, bool]]:
        """Layers whose output was seen, and whether it broke with this very step. It waits for the device.

        A layer that was broken in a step before as well is left out: it shows nothing.
        """
        now = self._broken(step)
        before = self._broken(max((each for each in tuple(self._of_steps) if each < step), default=-1))
        return [(place, broken) for place, broken in sorted(now.items()) if not before.get(place)]

    def _broken(self, step: int) -> dict[int, bool]:
        places, sums = self._of_steps.get(step, ([], None))
        broken: dict[int, bool] = {}
        for place, finite in zip(places, [] if sums is None else sums.isfinite().tolist(), strict=True):
            broken[place] = broken.get(place, False) or not finite
        return broken


_CALLS_AT_FIRST: Final = 4
"""Of each layer in a step whose output is seen. Steps after one with more have room for as many."""
_MOST_CALLS: Final = 4096
"""Of one step whose output is seen: a model may run for long without a step."""
_MOST_STEPS: Final = 1024
"""As many as a sample may hold."""
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
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    score_mod: ScoreMod | None = None,
    largest: Tensor | None = None,
    rounds: Rounds = "operands",
) -> Tensor:
    """`out` [..., H, Sq, D], whose backward measures rows of the attention that gave it.

    query [..., H, Sq, D]; key, value [..., Hkv, Sk, D]; mask as PyTorch's attn_mask, bool or added to the scores,
    broadcast to [..., H, Sq, Sk]. state int64 [H, SLOT_COUNT] and tick int64 [1], which each measurement moves on, are
    written.
    sampling: what start_sampling gave. cu_seqlens: where the sequences of
    queries and of keys begin that are packed into one row (B = 1), each int32 [N + 1]. score_mod: what else the call
    makes of its scores. largest: float32 [H], raised to the largest score of all rows in steps that are computed in
    full; inf where a call could not be. rounds: what the attention rounds on its way to `out`.
    """
    if score_mod is not None and not _measured_now(sampling, query):
        return out  # keeps nothing that the function holds
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    scale, softcap, dropout_p = constants(scale, softcap, dropout_p)
    learned = mask is not None and mask.requires_grad
    spec = AttentionSpec(scale, causal, *window, softcap, dropout_p, numerics, rounds=rounds, learned_bias=learned)
    options = (sampling, spec)
    given = _apart(out, query, key, value, mask, *(cu_seqlens or (None, None)))
    check = None if score_mod is not None else _check_of_gradients(out, query, state, sampling)
    arguments = (*given, state, tick, largest, options, score_mod, check)
    return cast(Tensor, _writable(_Probed.apply(*arguments)))  # type: ignore[no-untyped-call]


def _check_of_gradients(out: Tensor, query: Tensor, state: Tensor, key: str) -> GradientCheck | None:
    """What compares the gradients of PyTorch's attention that gave `out` in its backward, where this step does so. The
    node of autograd shows the gradients of this one call, whatever else reads the tensors."""
    sampling = None if torch.compiler.is_compiling() else _samplings.get(key)
    if sampling is None or sampling.fault or not (sampling.due and sampling.gradients):
        return None
    node = out.grad_fn
    if node is None or not node.name().startswith("ScaledDotProduct") or _capturing(query) or query.dim() != 4:
        return None
    try:
        return GradientCheck(state, node, partial(_end_with, sampling=sampling))
    except Exception as error:
        _end_with(error, sampling)
        return None


def _apart(*tensors: Tensor | None) -> list[Tensor | None]:
    """The same, with a view of one that came before, as where keys are values: torch.compile takes no Function into its
    graph that is given a tensor twice."""
    apart: list[Tensor | None] = []
    for x in tensors:
        apart.append(x.view_as(x) if x is not None and any(x is other for other in apart) else x)
    return apart


def _measured_now(key: str, query: Tensor) -> bool:
    """Whether the running step is measured. Compiled code that asks is compiled again where the answer changes."""
    sampling = _samplings.get(key)
    if sampling is None:
        return False
    # not whether there was a fault since: a recompute has to save what its forward saved
    return sampling.due or (not torch.compiler.is_compiling() and _capturing(query))


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
        largest: Tensor | None,
        options: tuple[str, AttentionSpec],
        score_mod: ScoreMod | None,
        check: GradientCheck | None,
    ) -> Tensor:
        ctx.save_for_backward(out, query, key, value, mask, cu_queries, cu_keys)
        ctx.state, ctx.tick, ctx.options = state, tick, options
        ctx.score_mod, ctx.largest, ctx.check = score_mod, largest, check
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors if torch.compiler.is_compiling() else _still_as_they_were(ctx, grad_out)
        if saved is not None:
            with torch.no_grad():  # a backward that is differentiated itself differentiates the identity alone
                if _is_quiet(ctx, saved):
                    return grad_out, *[None] * 12
                run: Any = _operator
                scores: list[Tensor] = []
                if ctx.score_mod is not None and torch.compiler.is_compiling():
                    scores = _scores_in_the_graph(Call(grad_out, *saved), ctx)
                elif ctx.score_mod is not None:  # a function is no argument of an operator
                    run = partial(probe_rows, score_mod=ctx.score_mod)
                key, spec = ctx.options
                run(grad_out, *saved, ctx.state, ctx.tick, ctx.largest, key, spec.text, scores)
                if ctx.check is not None:
                    _expect_gradients(ctx.check, Call(grad_out, *saved), ctx.tick, ctx.options)
        elif ctx.largest is not None:
            ctx.largest.fill_(math.inf)
        return grad_out, *[None] * 12


def _is_quiet(ctx: Any, saved: Sequence[Tensor]) -> bool:
    """Whether uncompiled code measures nothing of this call: then its output is seen without the operator, whose call
    takes longer."""
    sampling = _samplings.get(ctx.options[0])
    if torch.compiler.is_compiling() or sampling is None or sampling.outputs is None:
        return False
    if sampling.due or (sampling.in_full and ctx.largest is not None) or _capturing(saved[1]):
        return False
    _see_output(sampling, ctx.state, saved[0])
    return True


def _see_output(sampling: Sampling, state: Tensor, out: Tensor) -> None:
    if sampling.outputs is None or sampling.fault:
        return
    try:
        sampling.outputs.add(state, out)
    except Exception as error:
        _end_with(error, sampling)


def _expect_gradients(check: GradientCheck, call: Call, tick: Tensor, options: tuple[str, AttentionSpec]) -> None:
    key, spec = options
    sampling = _samplings.get(key)
    if sampling is None or sampling.fault:
        return
    try:
        with torch.autocast(call.query.device.type, enabled=False):
            check.expect(call.batched().rounded(spec.numerics), tick, spec)
    except Exception as error:
        _end_with(error, sampling)


def _end_with(error: Exception, sampling: Sampling) -> None:
    """The agent measures nothing any more, unless its faults are to be raised."""
    if sampling.strict:
        raise error
    if not sampling.fault:
        sampling.fault = f"{type(error).__name__}: {str(error)[:300]}"
        logger.warning("foreshock: the probe is off from now on; training continues: %s", sampling.fault)


def _scores_in_the_graph(call: Call, ctx: Any) -> list[Tensor]:
    """The Scores of sampled rows, computed by compiled code: what a function holds is known to it alone."""
    key, spec = ctx.options
    with torch.autocast(call.query.device.type, enabled=False):
        call = call.batched().rounded(spec.numerics)
        given = sampled_scores(_samplings[key].rows, call, ctx.tick, spec, ctx.score_mod)
        return [each for each in given if each is not None]


def _still_as_they_were(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...] | None:
    """What the forward saved; None where there is nothing to measure: many gradients are taken at once, or the model
    wrote into one of them since, as it may where its own attention did not save it."""
    sampling = _samplings.get(ctx.options[0])
    refused = {} if sampling is None else sampling.refused
    layer = ctx.state.data_ptr()
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(grad_out) or functorch.is_legacy_batchedtensor(grad_out):
        refused[layer] = "many gradients of it are taken at once, which our kernels do not"
        return None
    if torch.is_grad_enabled():
        refused[layer] = "its gradient is differentiated again, which our kernels' is not"
    try:
        return cast(tuple[Tensor, ...], ctx.saved_tensors)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        refused[layer] = "the model writes into its operands or its output afterwards"
        return None


# Defined by hand: torch.library.custom_op wraps its Python in some 300 microseconds more of it, in every call.
_library: Final = torch.library.Library("foreshock", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "probe_rows(Tensor grad_out, Tensor out, Tensor query, Tensor key, Tensor value, Tensor? mask, "
    "Tensor? cu_queries, Tensor? cu_keys, Tensor(a!) state, Tensor(b!) tick, Tensor(c!)? largest, "
    "str sampling_key, str spec_text, Tensor[] scores) -> ()",
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
    largest: Tensor | None,
    sampling_key: str,
    spec_text: str,
    scores: Sequence[Tensor] = (),
    score_mod: ScoreMod | None = None,
) -> None:
    """Counts the statistics of sampled rows into `state` where its agent samples this step, and raises `largest` where
    it is computed in full. Never waits for the device. scores: the Scores of the sampled rows, where they are computed
    already.

    While a CUDA graph is captured every step is measured, since what is captured is what each replay does.
    """
    sampling = _samplings.get(sampling_key)
    if sampling is None or sampling.fault or not query.numel() or not key.numel():
        return
    capturing = _capturing(query)
    sampling.captured |= capturing
    if not capturing:
        _see_output(sampling, state, out)
    in_full = largest is not None and sampling.in_full and not capturing
    if not (sampling.due or capturing or in_full):
        return
    spec = spec_of(spec_text)
    call = Call(grad_out, out, query, key, value, mask, cu_queries, cu_keys)
    try:
        with torch.autocast(query.device.type, enabled=False):
            rows = -(-sampling.rows // sampling.every_steps) if capturing else sampling.rows
            call = call.batched().rounded(spec.numerics)
            if in_full and largest is not None:
                raise_largest(largest, call, spec)
            if sampling.due or capturing:
                _sample(rows, call, state, tick, spec, score_mod, scores)
    except UnmeasurableError:
        pass
    except Exception as error:
        if largest is not None:
            largest.fill_(math.inf)
        _end_with(error, sampling)


def _capturing(query: Tensor) -> bool:
    return query.is_cuda and torch.cuda.is_current_stream_capturing()


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


def _sample(
    rows: int,
    call: Call,
    state: Tensor,
    tick: Tensor,
    spec: AttentionSpec,
    score_mod: ScoreMod | None,
    scores: Sequence[Tensor],
) -> None:
    kernels = _kernels() if call.query.is_cuda and score_mod is None and not scores else None
    if kernels is not None and kernels.serves(call.query, call.key, call.value, call.out, spec):
        kernels.count_sampled_rows(*call, state, tick, sizes(rows, *call.query.shape[::2]), spec)
    else:
        measure(rows, call, state, tick, spec, score_mod, Scores(*scores) if scores else None)
        tick += 1


def new_ticks(layers: int, device: torch.device) -> Tensor:
    """A counter for each layer, int64 [layers, 1], far apart, so that no two layers draw the same rows."""
    return (torch.arange(layers, dtype=torch.int64, device=device) << _TICK_BITS).unsqueeze(1)
