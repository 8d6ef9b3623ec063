"""Attention calls of a model that runs once, whatever computes them: what their tensors say of each head, and the place
of the first value that is not finite."""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from foreshock.contract.metrics.catalog import read
from foreshock.contract.slots import Floats, Slot
from foreshock.kernels.flash_attention import new_state
from foreshock.kernels.flash_attention.spec import AttentionSpec
from foreshock.kernels.flash_attention.visibility import BLIND
from foreshock.monitor.attention.probed_rows import (
    Call,
    ScoreMod,
    chosen_rows,
    measure,
    of_rows,
    pieces,
    times,
    wide,
)
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE, WatchedLayer, numerics_for

_ROWS: Final = 256
"""Rows of each head that are computed again in a call; all where there are no more."""
_COUNTED: Final = {"offset": "head.score_offset", "ties": "head.tied_rows_one", "entropy": "head.entropy"}


@dataclass(slots=True)
class AttentionCall:
    """One call of one layer's attention. `layer`: number of the watched module, from 0 in the model's own order."""

    layer: int
    name: str
    given: Call
    """the tensors as the model gave them"""
    spec: AttentionSpec
    score_mod: ScoreMod | None = None

    def batched(self) -> Call:
        """The call as [B, H, S, D], its operands in the type that they were multiplied in."""
        mask = self.given.mask
        if mask is not None and mask.is_floating_point():  # a mask is a mask whatever number it was written with
            mask = mask.detach().masked_fill(mask <= BLIND, -math.inf)
        return self.given._replace(mask=mask).batched().rounded(self.spec.numerics)


class Capture:
    """In a with block, every call of attention of a model that `foreshock.monitor.attach` watches, in order."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[AttentionCall] = []
        self._in_module: str | None = None
        """the first module that gave or was given values that are not finite, before any such call"""
        self._in_call: AttentionCall | None = None
        """the first call that gave or was given values that are not finite"""
        self._in_gradient: str | None = None
        """the first gradient that is not finite, in words"""
        modules = dict(model.named_modules())
        watched = [module.__dict__[LAYER_ATTRIBUTE] for module in modules.values() if LAYER_ATTRIBUTE in vars(module)]
        self.layers: dict[int, WatchedLayer] = dict(enumerate(watched))
        # a module without parameters may make masks
        self._modules = {name: each for name, each in modules.items() if each._parameters and not each._modules}
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._undo = ExitStack()

    def broken(self, *, finite: bool) -> str | None:
        """Where a value was the first that is not finite; `finite`: the loss is. A module may give infinities that harm
        nothing, as masks are."""
        if finite and self._in_call is None and self._in_gradient is None:
            return None
        if self._in_module is not None:
            return f"first in the forward, {self._in_module}"
        if self._in_call is not None:
            return f"first in the forward: {_broken_part(self._in_call)}"
        return f"first in the backward, {self._in_gradient}" if finite else "first in the forward, in the loss"

    def __enter__(self) -> "Capture":
        for number, layer in self.layers.items():
            kept, ours = partial(self._kept, number, layer), partial(self._ours, number, layer, layer.attend)
            vars(layer).update(probed=kept, attend=ours)  # as its own attention and as our kernels compute
            for method in ("probed", "attend"):
                self._undo.callback(vars(layer).pop, method)
        for name, module in self._modules.items():
            self._undo.callback(module.register_forward_hook(partial(self._left, name)).remove)
        for name, parameter in self._parameters.items():
            hook: Any = partial(self._trained, name)
            self._undo.callback(parameter.register_post_accumulate_grad_hook(hook).remove)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()

    def _kept(self, number: int, layer: WatchedLayer, out: Tensor, *operands: Tensor, **options: Any) -> Tensor:
        layer.met = True  # as its own method notes, in whose place this is
        self._take(number, layer, (out, *operands), **options)
        return out

    def _ours(self, number: int, layer: WatchedLayer, own: Any, *given: Any, **options: Any) -> Tensor | None:
        out: Tensor | None = own(*given, **options)
        if out is not None:
            self._take(number, layer, (out, *given[:3]), packed=given[3], **options)
        return out

    def _take(self, number: int, layer: WatchedLayer, tensors: tuple[Tensor, ...], **options: Any) -> None:
        out, query, key, value = tensors
        scale, (left, right) = options.get("scale"), options.get("window", (-1, -1))
        spec = AttentionSpec(
            1 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
            options.get("causal", "none"),
            left,
            right,
            options.get("softcap", 0.0),
            options.get("dropout_p", 0.0),
            numerics_for(query, layer.numerics),
        )
        packed = options.get("packed")
        ends = (None, None) if packed is None else (packed.cu_seqlens_q, packed.cu_seqlens_k)
        given = Call(torch.zeros_like(out), out, query, key, value, options.get("mask"), *ends)
        call = AttentionCall(number, layer.name, given, spec, options.get("score_mod"))
        self.calls.append(call)
        if self._in_call is None and not finite(tensors):
            self._in_call = call
        for name, tensor in zip(("out", "query", "key", "value"), tensors, strict=True):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._differentiated, call, name))  # type: ignore[no-untyped-call]

    def _left(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_module is None and self._in_call is None and not finite((output,)):
            what = "the output of" if finite(args) else "what enters"
            after = f"after the attention of layer {self.calls[-1].layer}" if self.calls else "before any attention"
            self._in_module = f"{after}: {what} {name or type(module).__name__} is not finite"

    def _trained(self, name: str, parameter: Tensor) -> None:
        if self._in_gradient is None and not finite([parameter.grad]):
            self._in_gradient = f"the gradient of {name} is not finite"

    def _differentiated(self, call: AttentionCall, name: str, grad: Tensor) -> None:
        if self._in_gradient is not None or finite([grad]):
            return
        if name == "out":
            self._in_gradient = f"the gradient that reaches the attention of layer {call.layer} is not finite"
        else:
            whose = f"{call.name}, {heads_of(grad)}: the gradient of its {name} is not finite"
            self._in_gradient = f"in the attention of layer {call.layer} ({whose}, the one that reaches it is)"


def heads_of(x: Tensor) -> str:
    """Which heads of [..., H, S, D] have values that are not finite, in words."""
    by_head = (~x.isfinite()).movedim(-3, 0).flatten(1).any(1) if x.dim() > 2 else x.isnan().any().view(1)
    bad: list[int] = by_head.nonzero().flatten().tolist()
    if len(bad) == len(by_head):
        return f"all {len(bad)} heads" if len(bad) > 1 else "its head"
    shown = ", ".join(map(str, bad[:3])) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
    return f"head{'s' * (len(bad) > 1)} {shown} of {len(by_head)}"


def finite(tensors: Iterable[Any]) -> bool:
    """Whether every tensor of floating point among `tensors` has finite values alone."""
    floats = (x for x in tensors if isinstance(x, Tensor) and x.is_floating_point())
    return all(bool(torch.isfinite(x.detach()).all()) for x in floats)


@torch.no_grad()
def measured(call: AttentionCall) -> dict[str, Floats]:
    """Quantities of one call by name, each [H]; NaN for what its tensors do not show.

    Those of `_COUNTED` are the agent's, of the same rows. The others are compared with float64.
    """
    with torch.autocast(call.given.query.device.type, enabled=False):
        given = call.batched()
        state = new_state(given.query.shape[1], given.query.device)
        tick = torch.zeros(1, dtype=torch.int64, device=state.device)
        measure(_ROWS, given, state, tick, call.spec, call.score_mod)
        found = _beside_float64(call, given, tick)
    words = state.cpu().numpy()
    found |= {cell: read(key, words) for cell, key in _COUNTED.items()}
    found["rows"] = words[:, [Slot.ROWS, Slot.EMPTY_ROWS, Slot.NONFINITE_ROWS]].sum(1).astype(np.float64)
    found["empty"] = words[:, Slot.EMPTY_ROWS].astype(np.float64)
    return found


def _beside_float64(call: AttentionCall, given: Call, tick: Tensor) -> dict[str, Floats]:
    """What all scores of a row share, the largest |score|, and how far the output is from that in float64."""
    spec = replace(call.spec, numerics="float64")
    parts: list[Tensor] = []
    chosen = chosen_rows(tick, _ROWS, *given.query.shape[::2])
    for entries, rows, (scores, *_), keys in pieces(*chosen, given, spec, call.score_mod):
        value, out = wide(given.value, entries, spec)[:, :, keys], of_rows(given.out, entries, rows).double()
        seen = ~scores.isneginf()
        shown = scores.masked_fill(~seen, 0.0)
        good = seen.any(-1) & shown.isfinite().all(-1) & out.isfinite().all(-1)
        truth = times(scores.masked_fill(~good.unsqueeze(-1), 0.0).softmax(-1), value)
        common = shown.sum(-1) / seen.sum(-1).clamp_min(1)
        squares = ((out - truth).square().sum(-1), truth.square().sum(-1))
        columns = (good.double(), common, shown.abs().amax(-1), *squares)
        parts.append(torch.stack([column.transpose(0, 1).flatten(1) for column in columns]))
    found = torch.cat(parts, 2)
    count, (common, largest, *squared) = (found[0] > 0).sum(1), found[1:].masked_fill(found[0] == 0, 0.0)
    off, size = (each.sum(1).sqrt() for each in squared)
    quantities = {
        "common": common.sum(1) / count,
        "common rms": (common.square().sum(1) / count).sqrt(),
        "largest": largest.amax(1).masked_fill(count == 0, math.nan),
        "output error": (off / size).masked_fill(torch.tensor(spec.dropout_p > 0, device=off.device), math.nan),
    }
    return {name: values.cpu().numpy() for name, values in quantities.items()}


@torch.no_grad()
def _broken_part(call: AttentionCall) -> str:
    """What of a call is not finite, where and why, in words."""
    where = f"layer {call.layer} ({call.name})"
    for name, tensor in (("queries", call.given.query), ("keys", call.given.key), ("values", call.given.value)):
        if not finite([tensor]):
            return f"the {name} that enter the attention of {where} are not finite, {heads_of(tensor)}"
    broken = f"the output of the attention of {where}, {heads_of(call.given.out)}, is not finite, and what enters it is"
    given, spec = call.batched(), replace(call.spec, numerics="float64")
    bad = (~given.out.isfinite()).any(-1)
    entry, head, _ = bad.nonzero()[0].tolist()
    rows = bad[entry, head].nonzero().flatten()[None, :_ROWS]
    some = pieces(torch.tensor([entry], device=rows.device), rows, given, spec, call.score_mod)
    if all(bool((~scores.isfinite()).all(-1)[0, head].all()) for _, _, (scores, *_), _ in some):
        return f"{broken}: these rows see no key, the mask hides everything from them"
    key = given.key[entry, head // (given.query.shape[1] // given.key.shape[1])]
    product = float((given.query[entry, head, rows[0]].double() @ key.double().mT).abs().max())
    limit = torch.finfo(call.given.out.dtype).max
    if product > limit and product * spec.scale <= limit:
        dtype = str(call.given.out.dtype).removeprefix("torch.")
        return f"{broken}: query times key reaches {product:.0f} before the scale, and {dtype} ends at {limit:.0f}"
    return broken
