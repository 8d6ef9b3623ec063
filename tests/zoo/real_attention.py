"""Which modules of a model compute softmax attention, told by what they execute, without foreshock's discovery.

Softmax attention is a softmax whose result, passed on through elementwise functions, is the left operand of a batched
matrix product, or one of PyTorch's own attention operators; with more than one query and more than one key.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_PASS_ON: Final = (
    "_to_copy", "clone", "mul", "div", "native_dropout", "masked_fill", "where", "nan_to_num", "add", "sub",
    "bernoulli", "copy", "contiguous", "index_select", "cat", "slice_backward",
)  # fmt: skip
_PRODUCTS: Final = ("bmm", "baddbmm", "mm", "addmm")


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, running: list[str | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = running
        self.found: dict[str, str] = {}
        self._weights: dict[int, Tensor] = {}
        """Softmax results and what elementwise functions made of them, by storage; kept alive, or a place is reused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removeprefix("_safe_").removesuffix("_")
        if "scaled_dot_product" in name and "backward" not in name and "fused_attention_overrideable" not in name:
            query, key = args[0], args[1]
            if query.shape[-2] > 1 and key.shape[-2] > 1:
                self._note("scaled_dot_product_attention")
        elif name in ("_softmax", "softmax"):
            result = out
            if result.dim() >= 3 and args[1] in (-1, result.dim() - 1) and min(result.shape[-2:]) > 1:
                self._keep(result)
        elif name in _PASS_ON:
            results = out if isinstance(out, tuple) else (out,)
            if any(isinstance(a, Tensor) and self._known(a) for a in args):
                self._keep(results[0])
        elif name in _PRODUCTS:
            left = args[1] if name in ("baddbmm", "addmm") else args[0]
            if self._known(left) and min(left.shape[-2:]) > 1:
                self._note("softmax and a product")
        return out

    def _keep(self, value: Tensor) -> None:
        self._weights[value.untyped_storage().data_ptr()] = value

    def _known(self, value: Tensor) -> bool:
        return value.untyped_storage().data_ptr() in self._weights

    def _note(self, how: str) -> None:
        known = [name for name in self.running if name is not None]  # a module may be made while the model runs
        self.found.setdefault(known[-1] if known else "", how)


@contextlib.contextmanager
def recorded_attention(model: nn.Module) -> Iterator[dict[str, str]]:
    """What the model's modules execute in the body: by name of the innermost module that runs it, how."""
    names = {id(module): name for name, module in model.named_modules()}
    running: list[str | None] = []

    def enter(module: nn.Module, _: Any) -> None:
        running.append(names.get(id(module)))

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if running:
            running.pop()

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    recorder = _Recorder(running)
    try:
        with recorder:
            yield recorder.found
    finally:
        for hook in hooks:
            hook.remove()
