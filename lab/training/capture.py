"""Takes what enters and leaves attention while a watched model runs: the tensors that a diagnosis is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from foreshock.kernels.flash_attention import op
from foreshock.kernels.flash_attention.spec import AttentionSpec, spec_of
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE


@dataclass(slots=True)
class AttentionCall:
    """One call of one layer's attention. Query, key and value are still in the graph of the model."""

    layer: int
    """number of the watched module, from 0 in the order of the model's own modules"""
    name: str
    module: nn.Module
    inputs: Tensor | None
    """first floating-point argument of the module, [B, S, E]; None where it has another shape"""
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    out_residual: Tensor
    lse: Tensor
    spec: AttentionSpec
    packed: bool
    grad_out: Tensor | None = None
    """dO, [B, H, S, D], after a backward"""


class Capture:
    """In a with block, every call of attention of a model that `foreshock.monitor.attach` watches, in order.

    Raises ValueError for a model that is not watched.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[AttentionCall] = []
        self._layers = {
            module.__dict__[LAYER_ATTRIBUTE].state.data_ptr(): (number, name, module)
            for number, (name, module) in enumerate(
                (name, module) for name, module in model.named_modules() if LAYER_ATTRIBUTE in module.__dict__
            )
        }
        if not self._layers:
            raise ValueError(f"{type(model).__name__} is not watched; call foreshock.monitor.attach on it first")
        self._inputs: dict[nn.Module, Tensor | None] = {}
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> "Capture":
        for _, _, module in self._layers.values():
            self._undo.append(module.register_forward_pre_hook(self._note, with_kwargs=True).remove)
        forward = op.attend

        def taking(*args: Any) -> tuple[Tensor, ...]:
            result: tuple[Tensor, ...] = forward(*args)
            if isinstance(state := args[3], Tensor) and state.data_ptr() in self._layers:
                self._take(args, result, *self._layers[state.data_ptr()])
            return result

        vars(op)["attend"] = taking
        self._undo.append(lambda: vars(op).update(attend=forward))
        return self

    def __exit__(self, *error: Any) -> None:
        while self._undo:
            self._undo.pop()()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point())
        first = next(given, None)
        self._inputs[module] = first if first is not None and first.dim() == 3 else None

    def _take(
        self, args: tuple[Any, ...], result: tuple[Tensor, ...], layer: int, name: str, module: nn.Module
    ) -> None:
        query, key, value = args[:3]
        out, residual, lse, *_ = result
        spec = spec_of(args[10])
        inputs = self._inputs.get(module)
        call = AttentionCall(
            layer, name, module, inputs, query, key, value, out, residual, lse, spec, packed=args[5] is not None
        )
        if out.requires_grad:
            out.register_hook(lambda grad: setattr(call, "grad_out", grad))  # type: ignore[no-untyped-call]
        self.calls.append(call)
