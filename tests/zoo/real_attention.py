"""Finds the modules of a model that compute softmax attention by the operators that they execute.

Independent of foreshock's discovery. Softmax attention is one of PyTorch's attention operators, or a softmax of scores
from a product of two activations, whose result (after elementwise functions) is the left operand of another such
product, with more than one query and key. A product with a parameter is a linear layer and does not count, so a
router's softmax, output probabilities and the mixing of residual streams are not attention.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_ELEMENTWISE: Final = (
    "_to_copy", "clone", "mul", "div", "native_dropout", "masked_fill", "where", "nan_to_num", "add", "sub",
    "bernoulli", "copy", "contiguous", "index_select", "cat", "slice_backward",
)  # fmt: skip
_LINEAR: Final = ("mm", "addmm")
_PRODUCTS: Final = ("bmm", "baddbmm", *_LINEAR)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module, running: list[str | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = running
        self.attention: dict[str, str] = {}
        self._parameters = {_place(parameter) for parameter in model.parameters()}
        # By storage address; tensors are kept alive so that no address is reused.
        self._scores: dict[int, Tensor] = {}
        """Products of activations, and all results computed from them except by linear layers."""
        self._weights: dict[int, Tensor] = {}
        """Softmax results, and elementwise results computed from them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removeprefix("_safe_").removesuffix("_")
        tensors = [a for a in pytree.tree_leaves(args) if isinstance(a, Tensor)]
        results = [r for r in pytree.tree_leaves(out) if isinstance(r, Tensor)]
        has_scores = any(_place(t) in self._scores for t in tensors)
        if "scaled_dot_product" in name and "backward" not in name and "fused_attention_overrideable" not in name:
            if min(args[0].shape[-2], args[1].shape[-2]) > 1:
                self._note("scaled_dot_product_attention")
        elif name in _PRODUCTS:
            left, right = args[-2:] if name in ("bmm", "mm") else args[1:3]
            if name not in _LINEAR or self._parameters.isdisjoint((_place(left), _place(right))):
                if _place(left) in self._weights and min(left.shape[-2:]) > 1:
                    self._note("softmax and a product")
                self._scores[_place(out)] = out
            return out
        elif name in ("_softmax", "softmax"):
            if has_scores and out.dim() >= 3 and args[1] in (-1, out.dim() - 1) and min(out.shape[-2:]) > 1:
                self._weights[_place(out)] = out
        elif name in _ELEMENTWISE and any(_place(t) in self._weights for t in tensors):
            self._weights[_place(results[0])] = results[0]
        if has_scores:
            self._scores |= {_place(result): result for result in results}
        return out

    def _note(self, kind: str) -> None:
        known = [name for name in self.running if name is not None]  # a module may be created during the forward
        self.attention.setdefault(known[-1] if known else "", kind)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def record_attention(model: nn.Module) -> Iterator[dict[str, str]]:
    """Record the attention executed in the body: its kind by name of the innermost module."""
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
    recorder = _Recorder(model, running)
    try:
        with recorder:
            yield recorder.attention
    finally:
        for hook in hooks:
            hook.remove()
