"""Takes what enters and leaves attention while a model runs once, whatever computes it, and the place where a value is
the first that is not finite."""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foreshock.kernels.flash_attention.spec import AttentionSpec
from foreshock.monitor.attention.probed_rows import ScoreMod
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE, WatchedLayer, numerics_for


@dataclass(slots=True)
class AttentionCall:
    """One call of one layer's attention, with the tensors as the model gave them."""

    layer: int
    """number of the watched module, from 0 in the order of the model's own modules"""
    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    spec: AttentionSpec
    mask: Tensor | None = None
    ends: tuple[Tensor, Tensor] | None = None
    """where packed sequences of queries and of keys begin"""
    score_mod: ScoreMod | None = None


class Capture:
    """In a with block, every call of attention of a model that `foreshock.monitor.attach` watches, in order."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[AttentionCall] = []
        self.broken_module: str | None = None
        """the first module that gave or was given values that are not finite, before any such call"""
        self.broken_call: AttentionCall | None = None
        """the first call that gave or was given values that are not finite"""
        self.broken_gradient: str | None = None
        """the first gradient that is not finite, in words"""
        modules = dict(model.named_modules())
        watched = [module.__dict__[LAYER_ATTRIBUTE] for module in modules.values() if LAYER_ATTRIBUTE in vars(module)]
        self.layers: dict[int, WatchedLayer] = dict(enumerate(watched))
        # a module without parameters may make masks
        own = {name: module for name, module in modules.items() if module._parameters and not module._modules}
        self._modules, self._parameters = own, dict(model.named_parameters())
        self._undo = ExitStack()

    def __enter__(self) -> "Capture":
        for number, layer in self.layers.items():
            kept, ours = partial(self._kept, number, layer), partial(self._ours, number, layer, layer.attend)
            vars(layer).update(probed=kept, attend=ours)  # as its own attention and as our kernels compute
            for method in ("probed", "attend"):
                self._undo.callback(vars(layer).pop, method)
        for name, module in self._modules.items():
            self._undo.callback(module.register_forward_hook(partial(self._left, name)).remove)
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
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
        ends = None if packed is None else (packed.cu_seqlens_q, packed.cu_seqlens_k)
        call = AttentionCall(
            number, layer.name, query, key, value, out, spec, options.get("mask"), ends, options.get("score_mod")
        )
        self.calls.append(call)
        if self.broken_call is None and not finite(tensors):
            self.broken_call = call
        for name, tensor in zip(("out", "query", "key", "value"), tensors, strict=True):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._differentiated, call, name))  # type: ignore[no-untyped-call]

    def _left(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.broken_module is None and self.broken_call is None and not finite((output,)):
            what = "the output of" if finite(args) else "what enters"
            after = f"after the attention of layer {self.calls[-1].layer}" if self.calls else "before any attention"
            self.broken_module = f"{after}: {what} {name or type(module).__name__} is not finite"

    def _trained(self, name: str, parameter: Tensor) -> None:
        if self.broken_gradient is None and not finite([parameter.grad]):
            self.broken_gradient = f"the gradient of {name} is not finite"

    def _differentiated(self, call: AttentionCall, name: str, grad: Tensor) -> None:
        if self.broken_gradient is not None or finite([grad]):
            return
        if name == "out":
            self.broken_gradient = f"the gradient that reaches the attention of layer {call.layer} is not finite"
        else:
            whose = f"{call.name}, {heads_of(grad)}: the gradient of its {name} is not finite"
            self.broken_gradient = f"in the attention of layer {call.layer} ({whose}, the one that reaches it is)"


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
