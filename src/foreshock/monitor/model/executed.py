"""Find the attention that a model computes from the autograd graph of a backward, without running anything for it.

Softmax attention is one of PyTorch's attention operators, an autograd function whose name contains attention, or a
softmax of scores that are a product of two activations, where the result of the softmax is an operand of another
product. A product with a parameter is a linear layer, so the softmax of a router is not attention. Additive attention
does not have such a product and is not detected, nor is attention in a graph that is compiled or recomputed in the
backward.

The softmax of such an attention saves its result for the backward, so rows that became NaN can be counted there. A
tensor that is packed by other hooks, such as those of activation checkpointing, is not read.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

_PRODUCTS: Final = {"BmmBackward0": 0, "MmBackward0": 0, "BaddbmmBackward0": 1}
"""Products of two matrices, and the index of the input that is the first matrix."""
_PASS_ON: Final = re.compile(
    "(Unsafe)?View|Reshape(Alias)?|Expand|Permute|Transpose|T|Clone|ToCopy|Mul|Div|Add|Sub|Neg|(Native|Fused)?Dropout|"
    "MaskedFill|Where|NanToNum|Slice|Select|Squeeze|Unsqueeze|Cat|Stack|Index|Gather|Alias|Unbind|Split|Sum"
)
"""Functions that change values elementwise, or only their shape or position."""
_SOFTMAX: Final = ("Softmax", "SafeSoftmax")
_OPERATOR: Final = re.compile(r"_?ScaledDotProduct\w*Attention\w*Backward0")
_FUNCTION: Final = re.compile("Atte?n|(?<![A-Za-z])atte?n|MHA|mha")
"""Parts of the name of an autograd function of a library that computes attention."""
_PROBE: Final = "_Probed"
"""The node after an attention that is intercepted and measured (monitor/attention/probe.py)."""
_LAYER: Final = re.compile(
    "Addmm|Linear|.*Convolution|Embedding|ScaledDotProduct|ScaledGroupedMm|GroupedMm|.*Checkpoint"
)
_FAR: Final = 64
"""Maximum number of nodes in one search through a node's inputs."""

BY_HAND: Final = "computes its attention by hand"
OUT_OF_REACH: Final = "calls PyTorch's attention where it cannot be met"


class Executed(NamedTuple):
    """An attention that is not intercepted."""

    how: str
    """BY_HAND, OUT_OF_REACH, or that it calls an autograd function, with its name"""
    softmax: Any = None
    product: Any = None
    """Nodes of the graph: its softmax, and the product of its queries and keys; None if it is not computed by hand"""


def attention_in(roots: Iterable[Tensor], model: nn.Module) -> dict[str, Executed] | None:
    """Return the attention that is not intercepted in a backward from `roots`, by name of the module with the weights
    of its queries and keys. None if the backward does not reach a parameter of `model`."""
    nodes = _all_from([root.grad_fn for root in roots if root.grad_fn is not None])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if not any(id(getattr(node, "variable", None)) in names for node in nodes):
        return None
    modules = dict(model.named_modules())
    found: dict[str, Executed] = {}
    met = {node for probe in nodes if _kind(probe) == _PROBE for node in _near(_inputs(probe)[0], _passes_on)}
    for node in (node for node in nodes if node not in met):
        kind = type(node).__name__
        if _is_product(node):
            executed = [each for weights in _operands(node) for each in _scores_behind(weights)]
        elif _OPERATOR.fullmatch(kind):
            executed = [(_inputs(node)[:2], Executed(OUT_OF_REACH))]
        elif (name := _function_of_a_library(node)) and (operands := list(filter(None, _inputs(node)))):
            # queries, keys and values may be one tensor
            executed = [((operands * 2)[:2], Executed(f"calls {name}, which foreshock does not measure"))]
        else:
            continue
        for pair, how in executed:
            if (owner := _owner(pair, names, modules)) is not None:
                found.setdefault(owner, how)
    return {name: found[name] for name in modules if name in found}  # nodes of a graph are not ordered


def _function_of_a_library(node: Any) -> str:
    """Return the full name of the attention that this node of a torch.autograd.Function belongs to; "" if the node is
    another one."""
    function = getattr(node, "_forward_cls", None)
    if function is None or not _FUNCTION.search(function.__name__) or function.__module__.startswith("foreshock."):
        return ""
    return f"{function.__module__}.{function.__name__}"


def _all_from(roots: list[Any]) -> list[Any]:
    seen, left = set(roots), list(roots)
    while left:
        for node in _inputs(left.pop()):
            if node is not None and node not in seen:
                seen.add(node)
                left.append(node)
    return list(seen)


def _inputs(node: Any) -> list[Any]:
    return [before for before, _ in node.next_functions]


def _operands(product: Any) -> list[Any]:
    first = _PRODUCTS[type(product).__name__]
    return _inputs(product)[first : first + 2]


def _kind(node: Any) -> str:
    return type(node).__name__.partition("Backward")[0]


def _near(start: Any, goes_on: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield `start` and its inputs recursively, the nearest first. Inputs of a node are followed if `goes_on` returns
    True for it."""
    level, seen = [start], {start}
    for node in level:
        yield node
        if node is not None and goes_on(node):
            for before in _inputs(node):
                if before not in seen and len(seen) < _FAR:
                    seen.add(before)
                    level.append(before)


def _passes_on(node: Any) -> bool:
    return _PASS_ON.fullmatch(_kind(node)) is not None


def _scores_behind(weights: Any) -> Iterator[tuple[list[Any], Executed]]:
    """Yield the two operands of each product of activations whose softmax is these weights, with its nodes."""
    for softmax in _near(weights, _passes_on):
        if softmax is not None and _kind(softmax) in _SOFTMAX:
            for node in filter(_is_product, _near(_inputs(softmax)[0], lambda node: not _is_product(node))):
                operands = _operands(node)
                # a product with the result of a softmax is the output of another attention or of a router
                if not any(map(_is_parameter, operands)) and not any(map(_weighs, operands)):
                    yield operands, Executed(BY_HAND, softmax, node)


def _is_product(node: Any) -> bool:
    return type(node).__name__ in _PRODUCTS


def _weighs(node: Any) -> bool:
    return any(before is not None and _kind(before) in _SOFTMAX for before in _near(node, _passes_on))


def _is_parameter(node: Any) -> bool:
    """Whether a product's operand is computed only from parameters and constants, and not by a layer."""
    return not any(map(_is_layer, _near(node, lambda before: not _is_layer(before))))


def _is_layer(node: Any) -> bool:
    return _is_product(node) or _LAYER.match(_kind(node)) is not None


def _owner(operands: list[Any], names: Mapping[int, str], modules: Mapping[str, nn.Module]) -> str | None:
    """Return the innermost module that contains the nearest weights of both operands; None if an operand does not have
    any."""
    paths = []
    for operand in operands:
        named = (names.get(id(getattr(node, "variable", None))) for node in _near(operand, lambda _: True))
        if (name := next(filter(None, named), None)) is None:
            return None
        paths.append(name.split(".")[:-1])
    path = [one for one, other in itertools.takewhile(lambda both: both[0] == both[1], zip(*paths, strict=False))]
    holder = modules[".".join(path)]
    containers = nn.MultiheadAttention | nn.Sequential | nn.ModuleList | nn.ModuleDict
    if path and type(holder).__module__.startswith("torch.nn.modules.") and not isinstance(holder, containers):
        path = path[:-1]  # a layer that computes queries and keys
    return ".".join(path)


def broken_rows(found: Executed) -> tuple[str, bool]:
    """Return how many rows of the softmax's result are NaN, and why, as a part of a sentence, empty if the result has
    none or is not known; and whether the rows first broke there, because queries and keys are finite."""
    weights = saved_by(found.softmax, "result")
    if weights is None or weights.dim() < 2:
        return "", False
    broken, what = weights.sum(-1).isnan(), "rows"
    if broken.dim() == 3:  # [B, H, S]
        broken, what = broken[:, int(broken.sum((0, 2)).argmax())], "rows of a head"
    if not (count := int(broken.sum())):
        return "", False
    names = ("batch1", "batch2") if "Baddbmm" in type(found.product).__name__ else ("self", "mat2")
    operands = [saved_by(found.product, name) for name in names]
    here = all(each is not None and bool(each.isfinite().all()) for each in operands)
    why = "overflows: queries and keys are finite" if here else "is not finite"
    return f"{count} of {broken.numel()} {what} see no key, or hold a score that {why}", here


def saved_by(node: Any, name: str) -> Tensor | None:
    """Return a tensor that a node of the graph saved for its backward; None if it is packed by other hooks or the node
    does not save a tensor of this name."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return kept[0]

    try:
        getattr(node, f"_raw_saved_{name}").register_hooks(pack, lambda tensor: tensor)
    except (AttributeError, RuntimeError):
        return None
    return kept[0] if type(kept[0]) is torch.Tensor else None
