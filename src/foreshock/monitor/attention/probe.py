"""Measure sampled rows of the model's native attention: `attach(model, attention="keep")`.

The user's kernel stays in place. An identity on its output passes the output's gradient to `foreshock::probe_rows` in
the backward. That computes a few rows again from q, k (scores in fp32) and v (output unrounded), and counts the same
statistics into the same state as foreshock's kernels do for every row. Rows are drawn on the device, spread over the
batch and its sequences, each with equal probability, so fractions and means are unbiased. In a step that is not
sampled, it only sums some numbers of the output.
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
"""Low bits of a tick that count a layer's measurements; the higher bits are the layer's index."""


@dataclass(slots=True)
class Sampling:
    """The sampling settings and results of one agent."""

    rows: int
    every_steps: int = 1
    """Steps between two measured steps. In a CUDA graph, this many times fewer rows are measured, because every replay
    measures."""
    due: bool = True
    """Whether the current step is measured."""
    gradients: bool = True
    """Whether rows of the gradients are compared in the current step, if it is measured."""
    in_full: bool = False
    """Whether the scores of all rows are computed in the current step, for the largest score of each head."""
    captured: bool = False
    """Whether a CUDA graph was captured: every replay measures, and changes take effect only after a new capture."""
    strict: bool = False
    fault: str | None = None
    """Error after which this agent does not measure any more; training continues."""
    refused: dict[int, str] = field(default_factory=dict)
    """By the address of a layer's state: a use of its attention that foreshock's kernels do not support."""
    outputs: "OutputSums | None" = None
    """Shows the layer whose output broke first, even in steps that are not measured."""


class OutputSums:
    """Sums of some numbers of each layer's output in each of the last steps, which are nonfinite if the output is.

    One feature is enough, because a nonfinite number reaches every feature in the next product with a weight. Every
    fourth row is enough, because it reaches later rows. Layers are identified by the address of their state.
    """

    def __init__(self, states: Sequence[Tensor]) -> None:
        self._places: Final = {state.data_ptr(): place for place, state in enumerate(states)}
        self._device: Final = states[0].device if states else torch.device("cpu")
        self._running: list[int] = []
        self._of_steps: Final[dict[int, tuple[list[int], Tensor]]] = {}
        self._make_room(_CALLS_AT_FIRST * len(states))

    def _make_room(self, calls: int) -> None:
        # Allocated outside the step, because tensors in the memory pool of torch.compile's CUDA graphs must not outlive
        # the step.
        self._sums = torch.zeros(min(calls, _MOST_CALLS), device=self._device)
        self._each = self._sums.unbind()

    def add(self, state: Tensor, out: Tensor) -> None:
        """Add the output `out` [..., S, D] of a layer in the current step."""
        place, count = self._places.get(state.data_ptr()), len(self._running)
        if place is not None and type(out) is Tensor and count < _MOST_CALLS:
            self._running.append(place)
            if count < len(self._each):
                rows = out[..., (out.shape[-2] - 1) % 4 :: 4, 0]
                # In two sums, because PyTorch adds strided numbers to a scalar in a single block of threads. For GPT-2
                # small that took 62 us per layer on an H100, most of the cost of a step without a sample.
                parts = rows.sum(-1, dtype=torch.float32)
                torch.sum(parts, dim=tuple(range(parts.dim())), out=self._each[count])

    def end(self, step: int) -> None:
        """Record the end of the current step, with number `step`."""
        places, self._running = self._running, []
        if places:
            self._of_steps[step] = places[: len(self._each)], self._sums[: len(places)].clone()
            if len(self._each) < min(len(places), _MOST_CALLS):
                self._make_room(len(places))
        if len(self._of_steps) > _MOST_STEPS:
            del self._of_steps[next(iter(self._of_steps))]

    def broken_at(self, step: int) -> list[tuple[int, bool]]:
        """Return layers with a known output, and whether it broke in exactly this step. It waits for the device.

        Layers that were already broken in an earlier step are omitted.
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
"""Initial number of calls per layer and step whose output is summed; it grows after a step with more calls."""
_MOST_CALLS: Final = 4096
"""Limit of calls per step whose output is summed, because a model may run for long without a step."""
_MOST_STEPS: Final = 1024
"""Number of stored steps: the maximum in one sample."""
_samplings: Final[dict[str, Sampling]] = {}
"""By key. Keys are strings, because a compiled graph cannot pass objects to an operator, and may treat a number as a
dynamic length."""
_numbers: Final = itertools.count(1)


def start_sampling(sampling: Sampling) -> str:
    """Register `sampling`; return the key with which calls of `probe` find it."""
    key = str(next(_numbers))
    _samplings[key] = sampling
    return key


def stop_sampling(key: str) -> None:
    """Unregister `key`; later calls with it do not measure."""
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
    """Return `out` [..., H, Sq, D] unchanged; its backward measures rows of the attention that computed it.

    query is [..., H, Sq, D]; key and value are [..., Hkv, Sk, D]; mask is like PyTorch's attn_mask, bool or added to
    the scores, and broadcasts to [..., H, Sq, Sk]. state, int64 [H, SLOT_COUNT], and tick, int64 [1], are updated by
    each measurement. sampling: a key of start_sampling. cu_seqlens: cumulative lengths of queries and of keys of packed
    sequences (B = 1), each int32 [N + 1]. score_mod: the call's function of its scores. largest: float32 [H], raised to
    the largest score over all rows in steps that compute these; inf if that failed. rounds: rounding of the attention.
    """
    if score_mod is not None and not _measured_now(sampling, query):
        return out  # do not keep tensors of score_mod alive
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
    """Return a check of the gradients of PyTorch's attention that computed `out`, if this step compares gradients.

    It uses the autograd node, which gives the gradients of this call only, even if the tensors have other uses.
    """
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
    """Replace repeated tensors by views, for example if keys are also values: torch.compile does not support a Function
    with the same tensor twice."""
    apart: list[Tensor | None] = []
    for x in tensors:
        apart.append(x.view_as(x) if x is not None and any(x is other for other in apart) else x)
    return apart


def _measured_now(key: str, query: Tensor) -> bool:
    """Whether the current step is measured. Compiled code that calls this is recompiled when the answer changes."""
    sampling = _samplings.get(key)
    if sampling is None:
        return False
    # independent of `fault`, because a recomputed forward has to save the same tensors as the first
    return sampling.due or (not torch.compiler.is_compiling() and _capturing(query))


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator, unused-ignore]
def _writable(probed: Tensor) -> Tensor:
    """Allow the model to modify its attention's output in place.

    PyTorch forbids that for a view returned by a Function, because the Function's backward would be skipped. Here that
    is harmless: this backward does not change gradients.
    """
    if probed._is_view():
        torch._C._autograd._set_creation_meta(probed, torch._C._autograd.CreationMeta.DEFAULT)
    return probed


class _Probed(torch.autograd.Function):
    """The identity. It saves its tensors in the usual way, so that checkpointing can recompute them."""

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
            with torch.no_grad():  # a second derivative only differentiates the identity
                if _is_quiet(ctx, saved):
                    return grad_out, *[None] * 12
                run: Any = _operator
                scores: list[Tensor] = []
                if ctx.score_mod is not None and torch.compiler.is_compiling():
                    scores = _scores_in_the_graph(Call(grad_out, *saved), ctx)
                elif ctx.score_mod is not None:  # an operator cannot take a function
                    run = partial(probe_rows, score_mod=ctx.score_mod)
                key, spec = ctx.options
                run(grad_out, *saved, ctx.state, ctx.tick, ctx.largest, key, spec.text, scores)
                if ctx.check is not None:
                    _expect_gradients(ctx.check, Call(grad_out, *saved), ctx.tick, ctx.options)
        elif ctx.largest is not None:
            ctx.largest.fill_(math.inf)
        return grad_out, *[None] * 12


def _is_quiet(ctx: Any, saved: Sequence[Tensor]) -> bool:
    """Whether this eager call is not measured; if so, sum its output directly, which is faster than the operator."""
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
    """Stop measuring after an error, or raise it if `strict`."""
    if sampling.strict:
        raise error
    if not sampling.fault:
        sampling.fault = f"{type(error).__name__}: {str(error)[:300]}"
        logger.warning("foreshock: the probe is off from now on; training continues: %s", sampling.fault)


def _scores_in_the_graph(call: Call, ctx: Any) -> list[Tensor]:
    """Return the Scores of sampled rows as part of the compiled graph, which has score_mod's captured tensors."""
    key, spec = ctx.options
    with torch.autocast(call.query.device.type, enabled=False):
        call = call.batched().rounded(spec.numerics)
        given = sampled_scores(_samplings[key].rows, call, ctx.tick, spec, ctx.score_mod)
        return [each for each in given if each is not None]


def _still_as_they_were(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...] | None:
    """Return the tensors that the forward saved; None if they cannot be measured.

    That is so if many gradients are computed at once, or if the model has modified one of the tensors in place, which
    is allowed if its own attention did not save that tensor.
    """
    sampling = _samplings.get(ctx.options[0])
    refused = {} if sampling is None else sampling.refused
    layer = ctx.state.data_ptr()
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(grad_out) or functorch.is_legacy_batchedtensor(grad_out):
        refused[layer] = "many gradients of it are computed at once, which foreshock's kernels do not support"
        return None
    if torch.is_grad_enabled():
        refused[layer] = "its gradient is differentiated again, which foreshock's kernels do not support"
    try:
        return cast(tuple[Tensor, ...], ctx.saved_tensors)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        refused[layer] = "the model modifies its operands or its output in place afterwards"
        return None


# Defined without torch.library.custom_op, which would add about 300 microseconds of Python to every call.
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
    """Count the statistics of sampled rows into `state` if the agent samples this step, and raise `largest` if it scans
    all rows. Never waits for the device.

    scores: the Scores of the sampled rows, if they are already computed. While a CUDA graph is captured, the call is
    always measured, because each replay repeats what was captured.
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
    """Return the Triton kernels, or None if they cannot be imported."""
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
    """Return a counter for each layer, int64 [layers, 1], with large distances, so that layers draw different rows."""
    return spread(torch.arange(layers, dtype=torch.int64, device=device) << _TICK_BITS).unsqueeze(1)


def spread(values: Tensor) -> Tensor:
    """Return a copy of values [N] in which they are 16 bytes apart, because torch.compile cannot make a CUDA graph that
    writes to unaligned inputs."""
    places = 16 // values.element_size()
    return values.repeat_interleave(places)[::places]
