"""Capture the attention calls of one forward and backward pass, for any implementation of attention.

The captured tensors give measurements of each head, and the location of the first non-finite value.
"""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from foreshock.contract.metrics.catalog import read
from foreshock.contract.slots import Slot
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
from foreshock.monitor.model.discovery import listed

_ROWS: Final = 256
"""Most rows of each head for which a call is computed again."""
_COUNTED: Final = {"offset": "head.score_offset", "ties": "head.tied_rows_one", "entropy": "head.entropy"}
_ONE_SIGN: Final = 0.75
"""Least ratio of mean to RMS, over the rows, of the mean score of a row. Drifting heads had 0.70 to 0.97, heads that
failed by a too high learning rate 0.17 to 0.81, those with the other sign of offset; healthy heads with a large RMS
have 0.1."""


@dataclass(slots=True)
class AttentionCall:
    """One call of one layer's attention. `layer`: index of the watched module, from 0 in the order of the model."""

    layer: int
    name: str
    given: Call
    """the tensors as passed by the model"""
    spec: AttentionSpec
    score_mod: ScoreMod | None

    def batched(self) -> Call:
        """Return the call as [B, H, S, D], with operands in the type in which they were multiplied."""
        mask = self.given.mask
        if mask is not None and mask.is_floating_point():  # large negative numbers mask as -inf does
            mask = mask.detach().masked_fill(mask <= BLIND, -math.inf)
        return self.given._replace(mask=mask).batched().rounded(self.spec.numerics)


class Capture(ExitStack):
    """In a with block, record every attention call of a model watched by `foreshock.monitor.attach`, in order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []
        self._forward: str | None = None
        """description of the first module or call with non-finite inputs or outputs"""
        self._backward: str | None = None
        """description of the first non-finite gradient"""
        self._harmed = False
        """whether an attention call or a gradient was not finite; infinite outputs of other modules do not count"""
        self._model = model
        modules = [vars(module) for module in model.modules()]
        watched = [each[LAYER_ATTRIBUTE] for each in modules if LAYER_ATTRIBUTE in each]
        self.layers: dict[int, WatchedLayer] = dict(enumerate(watched))

    def broken(self, *, finite: bool) -> str | None:
        """Describe where the first non-finite value was; None if there was none. finite: whether the loss is finite."""
        if finite and not self._harmed:
            return None
        return self._forward or self._backward or "first in the forward, in the loss"

    def __enter__(self) -> "Capture":
        for number, layer in self.layers.items():
            kept, ours = partial(self._kept, number, layer), partial(self._ours, number, layer, layer.attend)
            vars(layer).update(probed=kept, attend=ours)  # for native attention and for foreshock's kernels
            for method in ("probed", "attend"):
                self.callback(vars(layer).pop, method)
        for name, module in self._model.named_modules():
            if module._parameters and not module._modules:  # a module without parameters may make masks
                self.callback(module.register_forward_hook(partial(self._left, name)).remove)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                hook: Any = partial(self._trained, name)
                self.callback(parameter.register_post_accumulate_grad_hook(hook).remove)  # type: ignore[no-untyped-call]
        return self

    def _kept(self, number: int, layer: WatchedLayer, out: Tensor, *operands: Tensor, **options: Any) -> Tensor:
        layer.head_dim = operands[0].shape[-1]  # as in WatchedLayer.probed, which this method replaces
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
        if not finite(tensors):
            self._harmed = True
            self._forward = self._forward or f"first in the forward: {_broken_part(call)}"
        for name, tensor in zip(("out", "query", "key", "value"), tensors, strict=True):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._differentiated, call, name))  # type: ignore[no-untyped-call]

    def _left(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._forward is None and not finite((output,)):
            what = "the output of" if finite(args) else "what enters"
            after = f"after the attention of layer {self.calls[-1].layer}" if self.calls else "before any attention"
            self._forward = f"first in the forward, {after}: {what} {name or type(module).__name__} is not finite"

    def _trained(self, name: str, parameter: Tensor) -> None:
        self._note_gradient(parameter.grad, f"the gradient of {name} is not finite")

    def _differentiated(self, call: AttentionCall, name: str, grad: Tensor) -> None:
        words = f"the gradient that reaches the attention of layer {call.layer} is not finite"
        if name != "out":
            whose = f"{call.name}, {heads_of(grad)}: the gradient of its {name} is not finite"
            words = f"in the attention of layer {call.layer} ({whose}, the one that reaches it is)"
        self._note_gradient(grad, words)

    def _note_gradient(self, grad: Tensor | None, words: str) -> None:
        if self._backward is None and not finite([grad]):
            self._harmed, self._backward = True, f"first in the backward, {words}"


def heads_of(x: Tensor) -> str:
    """Describe which heads of [..., H, S, D] have non-finite values."""
    by_head = (~x.isfinite()).movedim(-3, 0).flatten(1).any(1) if x.dim() > 2 else x.isnan().any().view(1)
    bad = [str(head) for head in by_head.nonzero().flatten().tolist()]
    if len(bad) == len(by_head):
        return f"all {len(bad)} heads" if len(bad) > 1 else "its head"
    return f"head{'s' * (len(bad) > 1)} {listed(bad)} of {len(by_head)}"


def finite(tensors: Iterable[Any]) -> bool:
    """Whether all values of the floating-point tensors among `tensors` are finite."""
    floats = (x for x in tensors if isinstance(x, Tensor) and x.is_floating_point())
    return all(bool(torch.isfinite(x.detach()).all()) for x in floats)


class Measured:
    """Measurements of the heads of one layer, over all its calls.

    They are the agent's metrics, and comparisons of the same rows with float64.
    """

    def __init__(self, call: AttentionCall) -> None:
        given = call.given.batched()
        self._state = new_state(given.query.shape[1], given.query.device)
        self._sums = torch.zeros(5, len(self._state), dtype=torch.float64, device=given.query.device)
        """sums over rows [5, H]: rows, mean score of a row, its square, squared error and squared size of the output"""

    @torch.no_grad()
    def add(self, call: AttentionCall) -> None:
        """Add the measurements of one call."""
        with torch.autocast(call.given.query.device.type, enabled=False):
            given, spec = call.batched(), replace(call.spec, numerics="float64")
            tick = torch.zeros(1, dtype=torch.int64, device=given.query.device)
            measure(_ROWS, given, self._state, tick, call.spec, call.score_mod)
            chosen = chosen_rows(tick, _ROWS, *given.query.shape[::2])
            for entries, rows, (scores, *_), keys in pieces(*chosen, given, spec, call.score_mod):
                value, out = wide(given.value, entries, spec)[:, :, keys], of_rows(given.out, entries, rows).double()
                seen = ~scores.isneginf()
                shown = scores.masked_fill(~seen, 0.0)
                good = seen.any(-1) & shown.isfinite().all(-1) & out.isfinite().all(-1)
                truth = times(scores.masked_fill(~good.unsqueeze(-1), 0.0).softmax(-1), value)
                common = shown.sum(-1) / seen.sum(-1).clamp_min(1)
                squares = ((out - truth).square().sum(-1), truth.square().sum(-1))
                columns = torch.stack([torch.ones_like(common), common, common.square(), *squares])
                if spec.dropout_p > 0:  # the dropout mask of the kernel is unknown
                    columns[3:] = math.nan
                self._sums += columns.masked_fill(~good, 0.0).sum((1, 3))

    def cells(self) -> list[dict[str, float]]:
        """Return the measurements of each head by name, without those that are not finite."""
        words = self._state.cpu().numpy()
        found = {cell: read(key, words).tolist() for cell, key in _COUNTED.items()}
        count, common, squared, off, size = self._sums.cpu()
        mean, rms = common / count, (squared / count).sqrt()
        offset = torch.tensor(found["offset"], dtype=torch.float64)
        together = (mean * offset > 0) & (mean.abs() >= _ONE_SIGN * rms)
        rows = words[:, [Slot.ROWS, Slot.EMPTY_ROWS, Slot.NONFINITE_ROWS]].sum(1)
        found["shift"] = torch.where(together, torch.where(mean.abs() < offset.abs(), mean, offset), 0.0).tolist()
        found["largest"] = [max(largest, 0.0) for largest in read("head.row_max_abs", words).tolist()]
        found["even entropy"] = (words.view(float)[:, Slot.MOST_ENTROPY_SUM] / words[:, Slot.ROWS].clip(1)).tolist()
        found["output error"] = (off / size).sqrt().tolist()
        found |= {"rows": rows.tolist(), "empty": (words[:, Slot.EMPTY_ROWS] / rows.clip(1)).tolist()}
        return [
            {cell: float(values[head]) for cell, values in found.items() if math.isfinite(values[head])}
            for head in range(len(words))
        ]


@torch.no_grad()
def _broken_part(call: AttentionCall) -> str:
    """Describe which tensor of a call is not finite, in which layer and heads, and the likely reason."""
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
