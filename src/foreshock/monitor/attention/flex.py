"""Watches `torch.nn.attention.flex_attention.flex_attention`, by whatever name or compiled function it is called.

It is nearly always called through `torch.compile(flex_attention)`, which people keep in names, classes and attributes.
So the function's code is replaced and no name. The new code calls a copy of the old one, which every compiled
function compiles as before and with its own options, and hands operands and output to the probe.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.eval_frame import skip_code

from foreshock.contract.slots import Slot
from foreshock.monitor.attention.probed_rows import UnmeasurableError
from foreshock.monitor.attention.running import layer_of_this_call, note_call_outside, note_interception
from foreshock.monitor.attention.watched_layer import WatchedLayer
from foreshock.monitor.model.discovery import FLEX

Operands = tuple[Tensor, Tensor, Tensor]


def begin(operands: Operands, score_mod: Any, block_mask: Any, scale: Any, more_than_out: bool) -> Any:
    """The layer whose call this is, and the output of our kernels where they serve it."""
    layer = layer_of_this_call()
    if layer is None:
        note_call_outside(*operands[:2])
        return None, None
    note_interception(*operands[:2])
    why = None
    if score_mod is not None or block_mask is not None:
        why = "it passes a score_mod or a block_mask to flex_attention"
    elif more_than_out:
        why = "it asks flex_attention for more than its output"
    return layer, layer.serve(*operands, why=why, causal="none", scale=scale)


def end(
    layer: WatchedLayer | None, result: Any, operands: Operands, score_mod: Any, block_mask: Any, scale: Any
) -> Any:
    """`result` of PyTorch's function, of whose output the backward measures a sample."""
    if layer is None:
        return result
    out, *more = result if isinstance(result, tuple) else (result,)
    modified = None
    if score_mod is not None or block_mask is not None:
        compute = modified_scores if torch.compiler.is_compiling() else _named_where_it_fails
        modified = partial(compute, score_mod, block_mask, layer)
    probed = layer.probed(out, *operands, causal="none", scale=scale, score_mod=modified)
    largest = getattr(more[0], "max_scores", None) if more else None
    if largest is not None and probed.requires_grad and not torch.compiler.is_compiling():
        probed.register_hook(partial(_raise_largest, layer, largest.detach()))  # type: ignore[no-untyped-call]
    return (probed, *more) if more else probed


def _raise_largest(layer: WatchedLayer, largest: Tensor, grad: Tensor) -> None:
    """Count the largest score of every row, [B, H, Sq], where the call was asked for them."""
    if layer.tick is None or largest.shape[1] != len(layer.state):
        return
    floats, unseen = layer.state.view(torch.float64), ~largest.isfinite()
    for slot, values in ((Slot.SCORE_MAX, largest), (Slot.ROW_MAX_ABS, largest.abs())):
        exact = values.masked_fill(unseen, float("-inf")).amax((0, 2))
        floats[:, slot] = torch.maximum(floats[:, slot], exact.to(torch.float64))


def _named_where_it_fails(score_mod: Any, block_mask: Any, layer: WatchedLayer, *scores: Tensor) -> Tensor:
    try:
        return modified_scores(score_mod, block_mask, layer, *scores)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:200]}"
        layer.leave_alone(f"its score_mod or mask_mod cannot be computed on single rows: {problem}")
        raise UnmeasurableError from error


def modified_scores(score_mod: Any, block_mask: Any, layer: Any, scores: Tensor, *where: Tensor) -> Tensor:
    """What a call with these arguments makes of scores [e, H, c, k] at `where`, a ScoreMod's arguments."""
    if score_mod is not None:
        scores = _of_each(score_mod, scores, where, scores)
    if block_mask is not None:
        seen = _of_each(block_mask.mask_mod, scores, where)
        seen = seen & _listed(block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.BLOCK_SIZE, *where)
        if block_mask.full_kv_num_blocks is not None:
            full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
            seen = seen | _listed(*full, block_mask.BLOCK_SIZE, *where)
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores


def _of_each(function: Any, scores: Tensor, where: tuple[Tensor, ...], *given: Tensor) -> Tensor:
    """`function` of single numbers, those of `given` and of `where`, at each of `scores` [e, H, c, k]."""
    if torch.compiler.is_compiling():  # each vmap costs the compiler time; what it makes bigger here is fused away
        one_by_one = (x.expand_as(scores).reshape(-1) for x in (*given, *where))
        flat: Tensor = torch.vmap(function)(*one_by_one)
        return flat.view_as(scores)
    entry, head, query, key = where
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, 0, None)):
        function = torch.vmap(function, in_dims=(*[0] * len(given), *dims))
    each: Tensor = function(*given, entry.flatten(), head.flatten(), query[:, 0, :, 0], key)
    return each


def _listed(
    counts: Tensor, indices: Tensor, size: tuple[int, int], entry: Tensor, head: Tensor, query: Tensor, key: Tensor
) -> Tensor:
    """Which keys lie in the blocks that a BlockMask lists for a query, bool [e, H, c, k]: `counts` [B, H, rows of
    blocks] of the numbers `indices` [B, H, rows of blocks, columns of blocks] count."""
    at = entry % counts.shape[0], head % counts.shape[1], query // size[0]
    blocks = -(-len(key) // size[1])
    valid = torch.arange(indices.shape[-1], device=key.device) < counts[at]
    columns = torch.where(valid, indices[at].squeeze(-2), blocks).long()
    listed = torch.zeros(*columns.shape[:-1], blocks + 1, dtype=torch.bool, device=key.device)
    return listed.scatter(-1, columns, True)[..., key // size[1]]


class _Rebound:
    """What PyTorch's function calls while it is watched."""

    compiling = staticmethod(torch.compiler.is_dynamo_compiling)
    own: Any
    """The function as it was."""
    here = begin, end
    # Where flex_attention alone is compiled, its caller is not: nor are these, which differ from layer to layer.
    apart = torch._dynamo.disable(begin), torch._dynamo.disable(end)  # type: ignore[no-untyped-call]


def _watched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    # The arguments are PyTorch's to the letter: torch.compile remembers them of the function, whatever its code.
    rebound = _foreshock  # type: ignore[name-defined]  # noqa: F821  # this code sees the names of PyTorch's module
    begin, end = rebound.here if rebound.compiling() else rebound.apart
    operands, modified = (query, key, value), (score_mod, block_mask, scale)
    layer, served = begin(operands, *modified, return_lse or return_aux is not None)
    if served is not None:
        return served
    result = rebound.own(*operands, *modified, enable_gqa, return_lse, kernel_options, return_aux=return_aux)
    return end(layer, result, operands, *modified)


def rebind() -> Callable[[], None]:
    """Watch every call of flex_attention; returns the undoing."""
    if FLEX is None:
        return lambda: None
    code = FLEX.__code__
    _Rebound.own = FunctionType(code, FLEX.__globals__, FLEX.__name__, FLEX.__defaults__)
    _Rebound.own.__kwdefaults__ = FLEX.__kwdefaults__
    FLEX.__globals__["_foreshock"] = _Rebound
    # Whoever compiled the function calls it with a compiler at work, which would take this code as a whole, and
    # compile it for each layer. So it leaves this code alone and compiles what it calls.
    skip_code(_watched.__code__)
    FLEX.__code__ = _watched.__code__

    def undo() -> None:
        FLEX.__code__ = code
        del FLEX.__globals__["_foreshock"]

    return undo
