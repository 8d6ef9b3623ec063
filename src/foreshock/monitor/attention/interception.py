"""Intercept the attention calls of an unchanged model, and undo this when the last agent is closed.

transformers dispatches by name, and passes the module to its function (transformers_attention.py). Other code calls
`F.scaled_dot_product_attention`, which does not receive the module. Therefore hooks on each watched module's forward
record whose call it is, and every name in the process that is bound to the function is rebound to foreshock's function
while an agent is attached. Objects that stored the function before, such as a registry or a partial, bypass it.

`flex_attention` is nearly always called through `torch.compile(flex_attention)`, which user code stores in names,
classes and attributes. Therefore the function's code is replaced instead of names. The new code calls a copy of the old
one, which every compiled function compiles as before and with its own options, and passes operands and output to the
probe. `varlen_attn` (torchtitan), for concatenated sequences, is watched like a library's function.
"""

import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FunctionType
from typing import Any, Final

import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code

from foreshock.monitor.attention.libraries import stand_in
from foreshock.monitor.attention.probed_rows import UnmeasurableError
from foreshock.monitor.attention.watched_layer import (
    LAYER_ATTRIBUTE,
    WatchedLayer,
    again_in,
    clean_copies,
    enter,
    forget,
    layer_of_this_call,
    leave,
    leave_no_trace_in_copies,
    note_call_outside,
    note_interception,
    outside,
)
from foreshock.monitor.model.discovery import FLEX, ORIGINAL, SDPA, VARLEN, Entry, arguments_of, entries, places_of


def _held(space: dict[str, Any] | type, name: str) -> Any:
    """Return the value of a name in a namespace or a class; None if it does not have the name."""
    return (vars(space) if isinstance(space, type) else space).get(name)


def _put(space: dict[str, Any] | type, name: str, value: Any) -> None:
    if isinstance(space, type):
        setattr(space, name, value)
    else:
        space[name] = value


Operands = tuple[Tensor, Tensor, Tensor]


def begin(operands: Operands, score_mod: Any, block_mask: Any, scale: Any, more_than_out: bool) -> Any:
    """Return the layer of this call, and the output of our kernels; None for each that does not exist."""
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
    return layer, layer.on_kernels(*operands, why=why, causal="none", scale=scale)


def end(
    layer: WatchedLayer | None, result: Any, operands: Operands, score_mod: Any, block_mask: Any, scale: Any
) -> Any:
    """Return `result` of PyTorch's function; the backward of its output measures a sample of rows."""
    if layer is None:
        return result
    out, *more = result if isinstance(result, tuple) else (result,)
    modified = None
    if score_mod is not None or block_mask is not None:
        compute = modified_scores if torch.compiler.is_compiling() else _named_where_it_fails
        modified = partial(compute, score_mod, block_mask, layer)
    # Uncompiled, it rounds the product of queries and keys. A score_mod may enlarge any error of its scores.
    rounds = "scores" if score_mod is None else "unknown"
    probed = layer.probed(
        out, *operands, causal="none", scale=scale, score_mod=modified, rounds=rounds, by="torch.flex_attention"
    )
    return (probed, *more) if more else probed


def _named_where_it_fails(score_mod: Any, block_mask: Any, layer: WatchedLayer, *scores: Tensor) -> Tensor:
    try:
        return modified_scores(score_mod, block_mask, layer, *scores)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:200]}"
        layer.count_unmeasured_call(f"its score_mod or mask_mod cannot be computed on single rows: {problem}")
        raise UnmeasurableError from error


def modified_scores(score_mod: Any, block_mask: Any, layer: Any, scores: Tensor, *where: Tensor) -> Tensor:
    """Apply score_mod and block_mask of a call to scores [e, H, c, k]; `where`: the arguments of a ScoreMod."""
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
    """Apply a function of scalars, taken from `given` and `where`, at each of `scores` [e, H, c, k]."""
    if torch.compiler.is_compiling():  # each vmap costs compile time; fusion removes the expanded tensors
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
    """Return which keys are in the blocks that a BlockMask lists for a query, bool [e, H, c, k].

    `indices` [B, H, rows of blocks, columns of blocks] are the column numbers of blocks, of which the first `counts`
    [B, H, rows of blocks] are valid.
    """
    at = entry % counts.shape[0], head % counts.shape[1], query // size[0]
    blocks = -(-len(key) // size[1])
    valid = torch.arange(indices.shape[-1], device=key.device) < counts[at]
    columns = torch.where(valid, indices[at].squeeze(-2), blocks).long()
    listed = torch.zeros(*columns.shape[:-1], blocks + 1, dtype=torch.bool, device=key.device)
    return listed.scatter(-1, columns, True)[..., key // size[1]]


class _Rebound:
    """The functions that PyTorch's flex_attention calls while it is watched."""

    compiling = staticmethod(torch.compiler.is_dynamo_compiling)
    own: Any
    """The original function."""
    here = begin, end
    # If only flex_attention is compiled and not its caller, these are not compiled, because they differ between layers.
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
    # The arguments have to be exactly PyTorch's, because torch.compile caches the function's signature.
    rebound = _foreshock  # type: ignore[name-defined]  # noqa: F821  # runs with the globals of PyTorch's module
    begin, end = rebound.here if rebound.compiling() else rebound.apart
    operands, modified = (query, key, value), (score_mod, block_mask, scale)
    layer, computed = begin(operands, *modified, return_lse or return_aux is not None)
    if computed is not None:
        return computed
    result = rebound.own(*operands, *modified, enable_gqa, return_lse, kernel_options, return_aux=return_aux)
    return end(layer, result, operands, *modified)


def rebind_flex() -> Callable[[], None]:
    """Watch every call of flex_attention; return a function that undoes this."""
    if FLEX is None:
        return lambda: None
    code = FLEX.__code__
    _Rebound.own = FunctionType(code, FLEX.__globals__, FLEX.__name__, FLEX.__defaults__)
    _Rebound.own.__kwdefaults__ = FLEX.__kwdefaults__
    FLEX.__globals__["_foreshock"] = _Rebound
    # A compiled flex_attention runs under torch.compile, which would compile this code as a whole, once for each layer.
    # Skipping this code makes torch.compile compile only the functions that it calls.
    skip_code(_watched.__code__)
    FLEX.__code__ = _watched.__code__

    def undo() -> None:
        FLEX.__code__ = code
        del FLEX.__globals__["_foreshock"]

    return undo


def _enter(module: nn.Module, args: Any) -> None:
    layer = getattr(module, LAYER_ATTRIBUTE, None)
    # a copy of the module's __dict__ may contain the layer too
    enter(layer if torch.compiler.is_compiling() or layer is None or layer.home() is module else None)


_UNUSED: Final = sys.getrefcount(_enter)
"""References to the hook while it is not registered on any module: with this count, a search for copies is not
necessary."""


def leave_no_copies() -> None:
    """Remove hooks and layers from copies of watched modules; call it after these are not watched any more."""
    if sys.getrefcount(_enter) != _UNUSED:
        clean_copies(_enter)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replace PyTorch's function of this name, and watch it if a watched module calls it. Its causal mask is aligned to
    the top left."""
    layer = layer_of_this_call()
    if layer is None:
        note_call_outside(query, key)
        return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    note_interception(query, key)
    causal = "top_left" if is_causal else "none"
    why = None
    if attn_mask is None and not enable_gqa and query.dim() == 4 and key.dim() == 4 and query.shape[1] != key.shape[1]:
        why = "query and key differ in heads without enable_gqa"
    # partial instead of a nested function, because TorchScript parses this function when it compiles a caller
    own = functools.partial(
        SDPA, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    scores = {"causal": causal, "scale": scale, "dropout_p": dropout_p}
    return layer.call(own, query, key, value, why=why, mask=attn_mask, **scores)


# Objects that contain the function and are pickled while an agent is attached refer to it by PyTorch's name.
scaled_dot_product_attention.__module__ = F.__name__


def _keep_layer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that a recompute runs it in the layer that is current now."""
    layer = None if torch.compiler.is_compiling() else layer_of_this_call()
    if layer is None:
        return function

    @functools.wraps(function)
    def in_layer(*args: Any, **kwargs: Any) -> Any:
        with again_in(layer):
            return function(*args, **kwargs)

    return in_layer


# Functions that torch.utils.checkpoint.checkpoint calls. Rebinding checkpoint itself would miss modules that imported
# it by name or use it in a partial, and would hide it from torch.compile, which recognises it by identity.
_original_non_reentrant: Final = torch.utils.checkpoint._checkpoint_without_reentrant_generator
_original_reentrant: Final = torch.utils.checkpoint.CheckpointFunction


def _non_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _original_non_reentrant(_keep_layer(function), *args, **kwargs)


class _Reentrant:
    """Replaces torch.utils.checkpoint.CheckpointFunction."""

    @staticmethod
    def apply(function: Callable[..., Any], *args: Any) -> Any:
        return _original_reentrant.apply(_keep_layer(function), *args)  # type: ignore[no-untyped-call]


# torch.compile recognises PyTorch's function by identity and puts it into its graph as a whole. Its attention call is
# then traced later, when the layer that the hooks set is not current any more. A copy is traced like other functions.
_original_mha: Final = F.multi_head_attention_forward
_mha_copy: Final = types.FunctionType(
    _original_mha.__code__, _original_mha.__globals__, _original_mha.__name__, _original_mha.__defaults__
)

# The copy calls this to check a padding mask. PyTorch's check makes its message in a closure over the mask, which
# torch.compile cannot trace. Not every version has the check.
_original_padding_check: Final = getattr(F, "_check_key_padding_mask", None)


def _check_padding(key_padding_mask: Tensor, source_length: int, batch: int) -> None:
    if key_padding_mask.shape[0] != batch or key_padding_mask.shape[1] != source_length:
        assert _original_padding_check is not None
        _original_padding_check(key_padding_mask, source_length, batch)


_COMPILER_SETTINGS: Final = {
    # The hooks set the current layer. A compiled recompute is traced together with its forward and need not set it
    # again. Without this setting, torch.compile breaks the graph at this side effect inside a checkpoint.
    "skip_fwd_side_effects_in_bwd_under_checkpoint": True,
    # Otherwise the graph of an unwatched module would be reused for a watched one of the same class, without counting.
    "skip_nnmodule_hook_guards": False,
}


_varlen_attn: Final = None if VARLEN is None else stand_in(VARLEN, Entry("varlen", arguments_of(VARLEN)))

_REBOUND: Final[tuple[tuple[Any, Any], ...]] = (
    (SDPA, scaled_dot_product_attention),
    (VARLEN, _varlen_attn),
    (_original_mha, _mha_copy),
    (_original_non_reentrant, _non_reentrant),
    (_original_reentrant, _Reentrant),
)
"""PyTorch's functions, None for those that this version does not have, and foreshock's replacements."""

_OURS: Final = tuple(ours for original, ours in _REBOUND[:2] if original is not None)


def _restore_in_objects() -> None:
    """Replace foreshock's functions in objects that took them while an agent was attached, such as a model that chooses
    its attention function in its first forward. Such a model could not be pickled after close, because pickle finds
    PyTorch's function under the name. Searches all objects of the process."""
    originals = {id(ours): original for original, ours in _REBOUND}
    modules = {id(getattr(module, "__dict__", None)) for module in list(sys.modules.values())}
    for holder in gc.get_referrers(*_OURS):
        space = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        if isinstance(holder, types.CellType):
            holder.cell_contents = originals.get(id(holder.cell_contents), holder.cell_contents)
        elif isinstance(holder, list):
            holder[:] = [originals.get(id(value), value) for value in holder]
        elif isinstance(holder, partial) and id(holder.func) in originals:
            state = originals[id(holder.func)], holder.args, holder.keywords, vars(holder)
            holder.__setstate__(state)  # type: ignore[attr-defined]
        elif isinstance(space, dict) and id(space) not in modules and not space.keys() >= {"__module__", "__doc__"}:
            # Not a class, whose attributes are not pickled.
            for name, value in list(space.items()):
                space[name] = originals.get(id(value), value)


class SdpaRebinding:
    """Rebinds every name of PyTorch's attention, and the objects that calls of libraries pass through, while at least
    one agent is attached."""

    def __init__(self) -> None:
        self._users = 0
        self._places: list[tuple[dict[str, Any] | type, str, Any, Any]] = []
        """Namespace or class, name in it, original and replacement."""
        self._modules = 0
        """The number of imported modules when libraries were last searched for."""
        self._undo: Final = ExitStack()
        self._references: list[int] = []
        """References to foreshock's functions before they were bound to PyTorch's names."""

    def acquire(self) -> None:
        """Rebind the functions, unless another agent already did."""
        self._users += 1
        if not self._places:
            self._references = list(map(sys.getrefcount, _OURS))
            # torch.compile looks up PyTorch's functions by name, once, when it first traces one. It must do so before
            # they are rebound. Otherwise it takes foreshock's for PyTorch's and does not trace it, so it cannot count.
            torch._dynamo.trace_rules.lookup(SDPA)
            ours = {id(SDPA): scaled_dot_product_attention, id(VARLEN): _varlen_attn}
            for space, name, original in places_of(SDPA, VARLEN):
                self._bind(space, name, ours[id(original)])
            self._bind(vars(F), "multi_head_attention_forward", _mha_copy)
            if _original_padding_check is not None:
                self._bind(vars(F), "_check_key_padding_mask", _check_padding)
            checkpoints = vars(torch.utils.checkpoint)
            self._bind(checkpoints, "_checkpoint_without_reentrant_generator", _non_reentrant)
            self._bind(checkpoints, "CheckpointFunction", _Reentrant)
            self._undo.callback(rebind_flex())
            for name, value in _COMPILER_SETTINGS.items():
                if hasattr(torch._dynamo.config, name):  # some versions lack a setting
                    self._undo.callback(setattr, torch._dynamo.config, name, getattr(torch._dynamo.config, name))
                    setattr(torch._dynamo.config, name, value)
        self.follow_imports()

    def follow_imports(self) -> bool:
        """Rebind objects of libraries that were imported since the last call; return whether there were any. Costs
        nothing if nothing was imported."""
        if not self._users or len(sys.modules) == self._modules:
            return False
        self._modules = len(sys.modules)
        found = list(entries())
        for space, name, original, entry in found:
            self._bind(space, name, stand_in(original, entry))
        return bool(found)

    def _bind(self, space: dict[str, Any] | type, name: str, ours: Any) -> None:
        self._places.append((space, name, _held(space, name), ours))
        _put(space, name, ours)

    def release(self) -> None:
        """Restore every name when the last agent is closed, except names that other code has rebound since. Names
        imported in the meantime are bound to foreshock's function, and get the original too."""
        self._users -= 1
        if self._users == 0:
            self._restore_names()
            if list(map(sys.getrefcount, _OURS)) != self._references:
                _restore_in_objects()
            self._modules = 0
            forget()

    def _restore_names(self) -> None:
        libraries = [(before, ours) for _, _, before, ours in self._places if hasattr(ours, ORIGINAL)]
        for space, name, before, ours in reversed(self._places):
            if _held(space, name) is ours:
                _put(space, name, before)
        self._places.clear()
        self._undo.close()  # first, because the following search of all modules may be interrupted
        originals = {id(ours): original for original, ours in (*_REBOUND, *libraries)}
        for space, name, ours in places_of(*(ours for _, ours in (*_REBOUND, *libraries))):
            space[name] = originals[id(ours)]


sdpa_rebinding: Final = SdpaRebinding()


_HOOK_ID: Final = -1
"""The same in every module: with different ids, layers that are compiled separately would each need their own graph,
and torch.compile gives up after eight. PyTorch's ids count up from 0."""


def watch_module(module: nn.Module, layer: WatchedLayer) -> Callable[[], None]:
    """Count the attention calls in this module's forward into `layer`; return a function that undoes this."""
    module.__dict__[LAYER_ATTRIBUTE] = layer
    layer.home = weakref.ref(module)
    outside.layers.add(layer)
    undo = ExitStack()
    undo.callback(leave_no_trace_in_copies(module))
    undo.callback(outside.layers.discard, layer)
    undo.callback(module.__dict__.pop, LAYER_ATTRIBUTE, None)
    places: list[tuple[dict[Any, Any], Any]] = [
        (module._forward_pre_hooks, _enter),
        (module._forward_hooks, leave),
        (module._forward_hooks_always_called, True),
    ]
    for place, value in places:
        place[_HOOK_ID] = value
        undo.callback(place.pop, _HOOK_ID, None)
    return undo.close
