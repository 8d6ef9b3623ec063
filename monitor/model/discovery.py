"""Finds the attention modules of a model, and describes what each one is and what can serve it."""

import inspect
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn.attention import flex_attention as flex

try:
    from torch.nn.attention import varlen
except ImportError:  # before torch 2.9
    varlen = None  # type: ignore[assignment]

from foreshock.monitor.model.callees import (
    attributes_of,
    called_by,
    forget,
    is_by_hand,
    kept_by,
    own_name,
)
from foreshock.monitor.model.layers import (
    NOT_FOUND,
    Projection,
    all_query_heads,
    find_projection,
    key_heads_by_width,
    query_width,
    why_unmeasured,
)
from foreshock.monitor.model.libraries import calls_library, make_of
from foreshock.monitor.model.sharding import is_sharded, part_of, tensor_parallel_dims, under_fsdp
from foreshock.monitor.model.weights import stored

Route = Literal["transformers", "scaled_dot_product_attention", "unserved"]

SDPA_NAME: Final = "scaled_dot_product_attention"
SDPA: Final = torch.nn.functional.scaled_dot_product_attention
"""PyTorch's own function, whatever the name is bound to later."""

VARLEN_NAME: Final = "varlen_attn"
_varlen: Final[Any] = getattr(varlen, VARLEN_NAME, None)
VARLEN: Final[Any] = _varlen if _varlen and "window_size" in inspect.signature(_varlen).parameters else None
"""PyTorch's function for packed sequences; None in a version that has none, or, as 2.10, one of other arguments."""

FLEX_NAME: Final = "flex_attention"
_flex: Final[Any] = flex.flex_attention
FLEX: Final[Any] = _flex if (_flex.__code__.co_argcount, _flex.__code__.co_kwonlyargcount) == (9, 1) else None
"""PyTorch's function of modified scores and block masks; None in a version of other arguments, as before 2.9."""

_UNSERVED: Final = re.compile(
    r"_?flash_attn\w*(func|kvcache|forward)|memory_efficient_attention\w*|sage_?att\w*|npu_fusion_attention|"
    r"(fused_)?neighborhood_attention|na[123]d(_qk|_av)?|_scaled_dot_product_\w+"
    + ("" if VARLEN else f"|{VARLEN_NAME}")
    + ("" if FLEX else f"|{FLEX_NAME}")
)
"""Attention of other makes, by the names of its functions: foreshock sees no call of theirs."""

_DISPATCHERS: Final = ("dispatch_attention_fn", "multi_head_attention_forward")
"""Functions that call scaled_dot_product_attention unless they are set otherwise: diffusers', PyTorch's own."""

_HEADS: Final = (
    "num_attention_heads_per_partition",  # Megatron
    "num_heads",
    "n_heads",
    "n_head",
    "num_attention_heads",
    "nhead",
    "heads",
    "n_local_heads",
)
_KV_HEADS: Final = (
    "num_query_groups_per_partition",  # Megatron
    "num_gqa_groups_per_partition",  # TransformerEngine
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_kv_head",
    "n_local_kv_heads",
    "n_query_groups",
    "kv_heads",
)
_HEAD_DIM: Final = (
    "qk_head_dim",
    "hidden_size_per_attention_head",  # Megatron
    "hidden_size_per_attention_head_k",  # TransformerEngine
    "head_dim",
    "head_size",
    "d_head",
    "dim_head",
    "attention_head_size",
    "d_k",
    "key_dim",
)
_WIDTH: Final = ("n_embd", "embed_dim", "hidden_size", "d_model", "all_head_size")
_CONFIGS: Final = ("config", "cfg", "args", "model_args")


@dataclass(frozen=True, slots=True)
class Found:
    """One attention module. `problem` says why it cannot be watched; None when it can."""

    name: str
    module: nn.Module
    route: Route
    heads: int = 0
    """Those that this process computes."""
    kv_heads: int = 0
    """0 where neither an attribute nor a projection shows it."""
    head_dim: int = 0
    """0 where neither shows it: the first call does."""
    first_head: int = 0
    """Global number of the first of them (tensor parallelism)."""
    projection: Projection | None = None
    unmeasured: str = ""
    """Why the norms of its weights are not measured, where there is no projection."""
    owner: nn.Module | None = None
    """Whose children make its queries and keys, where no name shows which."""
    problem: str | None = None
    also: tuple[str, ...] = ()
    """Other names of the very same module: the layers of a model may share one."""
    looks_up: frozenset[str] = frozenset()
    """Every name that its code looks up."""


def find_attention(model: nn.Module, given_heads: dict[str, int]) -> list[Found]:
    """Every module of `model` that computes attention, in the order of the model's own modules.

    `given_heads` gives the number of heads, by module name, where no attribute of the module shows it.
    """
    forget()
    try:
        return _find_attention(model, given_heads)
    finally:
        forget()  # and hold on to nobody's functions


def _find_attention(model: nn.Module, given_heads: dict[str, int]) -> list[Found]:
    aliases: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        aliases.setdefault(id(module), []).append(name)
    # .items(): the dictionary of a module that TorchScript compiled cannot be iterated itself
    parents = {f"{name}.{c}" if name else c: m for name, m in model.named_modules() for c, _ in m._modules.items()}
    found: list[Found] = []
    libraries: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in libraries):
            continue  # a part of a library's module
        route, make = _route(module), make_of(module)
        if make is not None:
            route = "scaled_dot_product_attention"
            libraries.append(f"{name}." if name else "")
        if route is None and name in given_heads:  # whoever attached knows more than its code shows
            route = "scaled_dot_product_attention"
        if route is not None:
            described = _describe(name, module, parents.get(name), route, given_heads.get(name))
            also = tuple(alias for alias in aliases[id(module)] if alias != name)
            found.append(replace(_share(described, model), also=also, looks_up=called_by(module)))
    return found


def _route(module: nn.Module) -> Route | None:
    if isinstance(module, nn.MultiheadAttention):
        return "scaled_dot_product_attention"
    if _keeps_ours(attributes_of(module)):
        return "unserved"
    names = called_by(module)
    if "ALL_ATTENTION_FUNCTIONS" in names:
        return "transformers"
    pytorchs = SDPA_NAME in names or (VARLEN and VARLEN_NAME in names) or names.intersection(_DISPATCHERS)
    if pytorchs or calls_library(module):
        return "scaled_dot_product_attention"
    if FLEX and (FLEX_NAME in names or FLEX_NAME in map(own_name, kept_by(module))):  # whatever holds it
        return "scaled_dot_product_attention"
    return "unserved" if _why_unserved(module) else None


def _why_unserved(module: nn.Module) -> str | None:
    """What a module does that computes attention by none of the functions that we meet; None where it computes none."""
    kept = list(kept_by(module))
    if _keeps_ours(kept):
        return "keeps PyTorch's attention in an attribute, a table, a partial or a default, where it cannot be met"
    if any(_UNSERVED.fullmatch(name) for name in {*called_by(module), *map(own_name, kept)}):
        return "calls an attention of another make"
    return "computes its attention by hand" if is_by_hand(module) else None


def _keeps_ours(kept: Iterable[Any]) -> bool:
    return any(each is function for each in kept for function in (SDPA, VARLEN) if function is not None)


def _describe(name: str, module: nn.Module, parent: nn.Module | None, route: Route, given_heads: int | None) -> Found:
    if route == "unserved":
        why = f"it {_why_unserved(module)}; have it call scaled_dot_product_attention or varlen_attn"
        return Found(name, module, route, problem=why)
    # an inner module that only calls the kernel (torchtitan's) leaves heads and weights to the module round it
    owner = module if parent is None or given_heads or _number(module, _HEADS) else parent
    heads = given_heads or _number(owner, _HEADS)
    if heads and not given_heads and make_of(module) == "transformer_engine":
        heads //= _number(module, ("tp_size",)) or 1  # it numbers those of all processes
    if not heads:
        hint = f'give heads={{"{name}": number of heads}}'
        return Found(name, module, route, problem=f"no attribute tells how many heads it has; {hint}")
    known_kv_heads = _number(owner, _KV_HEADS)
    groups = _number(owner, ("num_key_value_groups",))
    if known_kv_heads in (None, heads) and groups and heads % groups == 0:
        known_kv_heads = heads // groups
    kv_heads = known_kv_heads or heads
    head_dim = (
        _number(owner, _HEAD_DIM) or (query_width(owner, heads, kv_heads) or _number(owner, _WIDTH) or 0) // heads
    )
    if not head_dim:  # nor then a projection of a known name
        unmeasured = why_unmeasured(owner)
        return Found(name, module, route, heads, known_kv_heads or 0, unmeasured=unmeasured)
    heads_by_weight = all_query_heads(owner, head_dim)
    if heads_by_weight and heads_by_weight > heads:  # some models keep the number of heads of their own rank
        heads, kv_heads = heads_by_weight, heads_by_weight * kv_heads // heads
    if heads % kv_heads:
        unmeasured = f"{heads} heads do not divide into {kv_heads} key heads"
        return Found(name, module, route, heads, 0, head_dim, unmeasured=unmeasured)
    projection = find_projection(owner, heads, kv_heads, head_dim)
    if projection is None and not known_kv_heads:
        kv_heads = key_heads_by_width(owner, heads, head_dim)
        if 0 < kv_heads < heads:
            projection = find_projection(owner, heads, kv_heads, head_dim)
    if projection is not None:
        return Found(name, module, route, heads, kv_heads, head_dim, projection=projection)
    why = why_unmeasured(owner)
    unnamed = owner if why == NOT_FOUND else None
    return Found(name, module, route, heads, kv_heads, head_dim, unmeasured=why, owner=unnamed)


def _share(found: Found, model: nn.Module) -> Found:
    """The heads that this process computes under tensor parallelism, as its sharded projections show it."""
    projection = found.projection
    if found.problem is not None or projection is None:
        return found
    spans = []
    for rows in (projection.query, projection.key):
        weight = stored(rows.holder, rows.weight)
        dims = tensor_parallel_dims(weight, under_fsdp=under_fsdp(model, found.name)) if is_sharded(weight) else []
        if not dims:
            return found
        first, last = part_of(weight, dims).rows
        ends = [(start, start + rows.head_dim) for start in rows.starts]
        held = [head for head, (start, stop) in enumerate(ends) if first <= start and stop <= last]
        if not held or any(start < edge < stop for start, stop in ends for edge in (first, last)):
            return replace(found, problem="tensor parallelism cuts through a head")
        spans.append(range(held[0], held[-1] + 1))
    heads, kv_heads = spans
    part = projection.of_heads(heads, kv_heads)
    return replace(found, heads=len(heads), kv_heads=len(kv_heads), first_head=heads.start, projection=part)


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """The first positive integer among the module's attributes, then among its configuration's."""
    holders: list[Any] = [module, *(c for c in (getattr(module, n, None) for n in _CONFIGS) if c is not None)]
    for holder in holders:
        for name in names:
            value = _attribute(holder, name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _attribute(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name, None)
    except Exception:  # transformers' configurations refuse a number that differs from layer to layer
        return None


def places_of(*functions: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Every (module globals, name, function) where a module is bound to one of these functions of PyTorch or of ours,
    PyTorch's own modules included; a function that is None is nowhere."""
    # What a compiled graph calls, it calls by its name in torch._C: that has to stay PyTorch's.
    left_alone = ("foreshock.", "torch._C")
    wanted = {id(function) for function in functions if function is not None}
    places: list[tuple[dict[str, Any], str, Any]] = []
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", None)
        # nearly every module has none: what says so must not look at half a million names one by one
        if not isinstance(space, dict) or wanted.isdisjoint(map(id, list(space.values()))):
            continue
        if not str(getattr(module, "__name__", "")).startswith(left_alone):
            places.extend((space, name, value) for name, value in list(space.items()) if id(value) in wanted)
    return places
