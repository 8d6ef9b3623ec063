"""Find candidates for attention modules by their attributes and children, and describe each one.

The model's code is not analysed. A module is a candidate if it has a number of heads and either layers that compute
queries or a class name that contains attention. The agent intercepts its calls of attention. The first step shows which
candidates compute attention, and which other modules do.

All calls of a library pass through a few of its objects: `flash_attn_func` calls `FlashAttnFunc.apply`. This module
recognises them without importing any library.
"""

import inspect
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.attention import flex_attention as flex

from foreshock.monitor.model.layers import (
    Projection,
    all_query_heads,
    find_projection,
    is_sharded,
    sizes_by_width,
    spans_of,
    stored,
    tensor_parallel_dims,
    under_fsdp,
    why_unmeasured,
)

try:
    from torch.nn.attention import varlen
except ImportError:  # before torch 2.9
    varlen = None  # type: ignore[assignment]

Make = Literal["flash_attn", "transformer_engine", "varlen"]

ORIGINAL: Final = "_foreshock_original"
"""Attribute of the replacement of a library's object: the original object."""

_FLASH_ATTN: Final = [
    f"FlashAttn{ends}{packed}Func" for ends in ("", "Varlen") for packed in ("", "QKVPacked", "KVPacked")
]
_KNOWN: Final[tuple[tuple[str, frozenset[str], Make], ...]] = (
    # flash_attn 2.3 or later, flash_attn_interface (3), flash_attn.cute (4), and copies of them in other modules
    *((name, frozenset({"softmax_scale", "causal", "window_size"}), "flash_attn") for name in _FLASH_ATTN),
    ("DotProductAttention", frozenset({"query_layer", "qkv_format", "attn_mask_type"}), "transformer_engine"),
)
"""Name of an object, arguments that it must have (otherwise it is unrelated and only has the same name), and its
library."""
_NAMES: Final = frozenset(name for name, _, _ in _KNOWN)


class Entry(NamedTuple):
    """An object through which calls of a library pass."""

    make: Make
    arguments: dict[str, Any]
    """The arguments in order, with their defaults or None; the forward of a module has "self" too."""


def recognised(value: Any) -> Entry | None:
    """Return the Entry of a library's function, torch.autograd.Function or module class; None for anything else."""
    if not isinstance(value, type | FunctionType) or value.__name__ not in _NAMES:
        return None
    value = vars(value).get(ORIGINAL, value)
    function = issubclass(value, torch.autograd.Function) if isinstance(value, type) else False
    if isinstance(value, type) and not function and not issubclass(value, nn.Module):
        return None
    called = value if isinstance(value, FunctionType) else value.forward
    arguments = arguments_of(called, after=int(function))
    makes = (make for name, wanted, make in _KNOWN if name == value.__name__ and wanted <= arguments.keys())
    make = next(makes, None)
    return None if make is None else Entry(make, arguments)


def arguments_of(function: Any, after: int = 0) -> dict[str, Any]:
    """Return the arguments of a function as in `Entry.arguments`, without the first `after`."""
    named = list(inspect.signature(function).parameters.values())[after:]
    return {each.name: None if each.default is each.empty else each.default for each in named}


def entries() -> Iterator[tuple[dict[str, Any] | type, str, Any, Entry]]:
    """Yield (globals of a module or a class, name in it, object, Entry) for every library that is imported."""
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", None)
        if not isinstance(space, dict):
            continue
        for name in _NAMES.intersection(space):
            value = space[name]
            if (entry := recognised(value)) is None:
                continue
            if issubclass(value, nn.Module) if isinstance(value, type) else False:
                if "forward" in vars(value) and not hasattr(value.forward, ORIGINAL):
                    yield value, "forward", value.forward, entry
            elif not hasattr(value, ORIGINAL):
                yield space, name, value, entry


def make_of(module: nn.Module) -> Make | None:
    """Return the library of an attention module; None if it does not belong to a known library."""
    found = (recognised(kind) for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return next((entry.make for entry in found if entry is not None), None)


SDPA: Final = torch.nn.functional.scaled_dot_product_attention
"""PyTorch's function, even if the name is rebound later."""

_varlen: Final[Any] = getattr(varlen, "varlen_attn", None)
VARLEN: Final[Any] = _varlen if _varlen and "window_size" in inspect.signature(_varlen).parameters else None
"""PyTorch's function for packed sequences; None if it is missing or, as in 2.10, has other arguments."""

_flex: Final[Any] = flex.flex_attention
FLEX: Final[Any] = _flex if (_flex.__code__.co_argcount, _flex.__code__.co_kwonlyargcount) == (9, 1) else None
"""PyTorch's function for modified scores and block masks; None if it has other arguments, as before 2.9."""

_ATTENTION: Final = re.compile("Att|(?<![A-Za-z])att|attent|attn|mha|msa|MHA|MSA|ATT")
"""Parts of the name of a class that computes attention."""
_QUERIES: Final = re.compile(
    r"(w_?|to_|c_)?(q|qkv|query|queries)(_?(proj|linear|states|layer))?|query_key_value|c_attn|in_proj", re.I
)
"""Common names of queries, or of the layer that computes them."""
_BASES: Final = ("torch.nn.modules.module", "transformers.modeling_utils")

_HEADS: Final = (
    "num_attention_heads_per_partition",  # Megatron
    "num_heads",
    "n_heads",
    "n_head",
    "num_attention_heads",
    "num_attn_heads",
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
)
_CONFIGS: Final = ("config", "cfg", "args", "model_args")


class Called(NamedTuple):
    """Sizes of a module's attention, as one of its calls shows them."""

    heads: int
    kv_heads: int
    head_dim: int
    rounds: bool = True
    """Whether its operands have 16 bits, also by autocast."""


@dataclass(frozen=True, slots=True)
class Found:
    """One attention module. `problem`: why it cannot be watched; None if it can."""

    name: str
    module: nn.Module
    heads: int = 0
    """The number of heads that this process computes."""
    kv_heads: int = 0
    """0 if neither an attribute nor a projection shows it."""
    head_dim: int = 0
    """0 if neither an attribute nor a projection shows it; the first call does."""
    first_head: int = 0
    """Global number of the first head of this process (tensor parallelism)."""
    projection: Projection | None = None
    unmeasured: str = ""
    """If there is no projection: why the norms of its weights are not measured."""
    owner: nn.Module | None = None
    """The module whose children compute queries and keys."""
    problem: str | None = None
    certain: bool = False
    """Whether it is attention even if the first step does not call it: a module of PyTorch or of a library, or one that
    the user names."""


def find_attention(
    model: nn.Module, given_heads: Mapping[str, int], called: Mapping[str, Called] | None = None
) -> list[Found]:
    """Return the modules of `model` that compute attention, in the order of `named_modules`.

    `given_heads`: numbers of heads by module name. `called`: findings of a step by the name of each module that called
    attention; None if nothing ran yet, in which case the result is a list of candidates.
    """
    found: list[Found] = []
    # .items(), because iterating over the dictionary of a TorchScript module fails
    parents = {f"{name}.{c}" if name else c: m for name, m in model.named_modules() for c, _ in m._modules.items()}
    with warnings.catch_warnings(action="ignore"):  # of attributes that a library deprecates
        for name in _chosen(model, given_heads, called):
            module, asked = model.get_submodule(name), given_heads.get(name)
            shown = (called or {}).get(name)
            described = _describe(name, module, parents.get(name), asked, shown)
            if described is None:
                continue
            certain = asked is not None or isinstance(module, nn.MultiheadAttention) or make_of(module) is not None
            found.append(replace(_share(described, model), certain=certain))
    return found


def _chosen(model: nn.Module, given_heads: Mapping[str, int], called: Mapping[str, Called] | None) -> list[str]:
    """Return the names of the modules to describe; of nested candidates only the innermost, without helpers."""
    if called is not None:
        return [name for name, _ in model.named_modules() if name in called]
    within: dict[str, set[str]] = {}  # of each candidate, the candidates in it
    attentions: set[str] = set()
    libraries: list[str] = []
    for name, module in model.named_modules():
        if name.startswith(tuple(libraries)):
            continue  # a part of a library's module
        if isinstance(module, nn.MultiheadAttention) or make_of(module) is not None:
            libraries.append(f"{name}." if name else "")
        elif name not in given_heads and not _looks_like_attention(module):
            continue
        path = name.split(".") if name else []
        for outer in within.keys() & {".".join(path[:length]) for length in range(len(path))}:
            within[outer].add(name)
        within[name] = set()
        attentions |= {name} if is_called_attention(module) else set()
    # A single candidate in a module called attention is a helper, such as the indexer of DeepSeek-V3.2. Several may be
    # the layers of a model, unless the outer module computes queries or the user names it.
    sure = {name for name in attentions if name in given_heads or _has_queries(model.get_submodule(name))}
    parts = (within[name] for name in attentions if len(within[name]) == 1 or name in sure)
    helpers = set().union(*parts) - attentions - given_heads.keys()
    return [name for name, inner in within.items() if name in given_heads or (name not in helpers and inner <= helpers)]


def _looks_like_attention(module: nn.Module) -> bool:
    """Whether a module may compute attention: its own attribute gives a number of heads, and it has parameters or a
    class name of attention; or its configuration gives the number, and it has parts or a class name of attention. The
    first step shows whether it does."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    if _number(module, _HEADS, ()):
        return is_called_attention(module) or next(module.parameters(), None) is not None
    return bool(_number(module, _HEADS)) and (is_called_attention(module) or _has_queries(module))


def _has_queries(module: nn.Module) -> bool:
    """Whether a part of a module, or a parameter, has a common name of queries or of the layer that computes them."""
    return any(_QUERIES.fullmatch(name) for part in (module._modules, module._parameters) for name, _ in part.items())


def is_called_attention(module: nn.Module) -> bool:
    """Whether the class name of a module, or of a base class, contains attention."""
    return any(_ATTENTION.search(kind.__name__) for kind in type(module).__mro__ if kind.__module__ not in _BASES)


def _describe(
    name: str, module: nn.Module, parent: nn.Module | None, given_heads: int | None, shown: Called | None
) -> Found | None:
    """Describe a module by its attributes, its weights and a call; None if none of them shows its number of heads."""
    # if an inner module only calls the kernel (torchtitan, OLMo-core), its parent has the weights
    inner = parent is not None and next(module.parameters(), None) is None
    owner = parent if inner and parent is not None else module
    heads = given_heads or (shown.heads if shown else None) or _number(module, _HEADS) or _number(owner, _HEADS)
    if heads and not given_heads and not shown and make_of(module) == "transformer_engine":
        heads //= _number(module, ("tp_size",)) or 1  # its attribute counts the heads of all processes
    if not heads:
        return None
    kv_heads = _number(owner, _KV_HEADS) or _number(module, _KV_HEADS) or 0
    kv_heads = shown.kv_heads if shown is not None and shown.kv_heads < heads else kv_heads
    kv_heads = kv_heads if heads % (kv_heads or heads) == 0 else 0
    head_dim = shown.head_dim if shown is not None else _number(owner, _HEAD_DIM) or 0
    head_dim = sizes_by_width(owner, heads, kv_heads, head_dim)[1]
    if head_dim and (of_all := all_query_heads(owner, head_dim)) > heads:  # its attribute counts this rank's heads
        heads, kv_heads = of_all, of_all * kv_heads // heads
    kv_heads, _ = sizes_by_width(owner, heads, kv_heads, head_dim)
    projection = find_projection(owner, heads, kv_heads or heads, head_dim) if head_dim else None
    kv_heads = kv_heads or (heads if projection is not None else 0)
    why = "" if projection is not None else why_unmeasured(owner)
    return Found(name, module, heads, kv_heads, head_dim, projection=projection, unmeasured=why, owner=owner)


def _share(found: Found, model: nn.Module) -> Found:
    """Restrict `found` to the heads that this process computes under tensor parallelism, as sharded projections show
    them."""
    projection = found.projection
    if found.problem is not None or projection is None:
        return found
    spans = []
    for rows in (projection.query, projection.key):
        weight = stored(rows.holder, rows.weight)
        dims = tensor_parallel_dims(weight, under_fsdp=under_fsdp(model, found.name)) if is_sharded(weight) else []
        if not dims:
            return found
        first, last = spans_of(weight, dims)[0]
        ends = [(start, start + rows.head_dim) for start in rows.starts]
        held = [head for head, (start, stop) in enumerate(ends) if first <= start and stop <= last]
        if not held or any(start < edge < stop for start, stop in ends for edge in (first, last)):
            return replace(found, problem="tensor parallelism cuts through a head")
        spans.append(range(held[0], held[-1] + 1))
    heads, kv_heads = spans
    part = projection.of_heads(heads, kv_heads)
    return replace(found, heads=len(heads), kv_heads=len(kv_heads), first_head=heads.start, projection=part)


def _number(holder: Any, names: Sequence[str], within: Sequence[str] = _CONFIGS) -> int | None:
    """Return the first positive integer among these attributes of `holder`, else of its attributes `within`."""
    for name in names:
        try:
            value = getattr(holder, name, None)
        except Exception:  # transformers' configurations raise if the number differs between layers
            value = None
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    configs = (config for each in within if (config := getattr(holder, each, None)) is not None)
    return next((number for config in configs if (number := _number(config, names, ()))), None)


def places_of(*functions: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Return (module globals, name, function) for every name that is bound to one of these functions of PyTorch or
    foreshock, also in PyTorch's own modules. Functions that are None are ignored."""
    # Compiled graphs call functions by their names in torch._C, which must stay bound to PyTorch's.
    left_alone = ("foreshock.", "torch._C")
    wanted = {id(function) for function in functions if function is not None}
    places: list[tuple[dict[str, Any], str, Any]] = []
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", None)
        # Nearly every module has none. This test has to be fast, because there are half a million names.
        if not isinstance(space, dict) or wanted.isdisjoint(map(id, list(space.values()))):
            continue
        if not str(getattr(module, "__name__", "")).startswith(left_alone):
            places.extend((space, name, value) for name, value in list(space.items()) if id(value) in wanted)
    return places


_HEAD: Final = ("layer", "attention module", "heads", "key heads", "head dim", "W_Q and W_K", "how it is watched")
_NAMED: Final = 3
"""Up to this size of a group, all members are listed."""


def listed(names: Sequence[str]) -> str:
    """Return the names of a group; if there are many, those in the middle are omitted."""
    return ", ".join(names) if len(names) <= _NAMED else f"{names[0]}, {names[1]}, ..., {names[-1]}"


def table_of(found: Sequence[Found], layouts: Iterable[str], how: str) -> str:
    """Return the table of attention modules; modules that differ only in their number share a line.

    `layouts`: the layout of W_Q and W_K of each watched module. `how`: how these modules are watched.
    """
    groups: dict[tuple[str, ...], tuple[tuple[str, ...], list[tuple[str, str]]]] = {}
    number, where = 0, iter(layouts)
    for each in found:
        label = "-" if each.problem else str(number)
        number += not each.problem
        name = each.name or "(the model)"
        sizes = [str(size) if size else "?" for size in (each.heads, each.kv_heads, each.head_dim)]
        layout = "norms are not measured: it is not watched" if each.problem else next(where)
        described = (*sizes, layout, f"not monitored: {each.problem}" if each.problem else how)
        like = (re.sub(r"\d+", "#", name), *described[:-1], re.sub(r"\d+", "#", described[-1]))
        groups.setdefault(like, (described, []))[1].append((label, name))
    rows = [_HEAD]
    for described, members in groups.values():
        labels, names = zip(*members, strict=True)
        together = f"{len(members)} x " if len(members) > 1 else ""
        in_turn = len(members) > 1 and described[-1] == how and int(labels[-1]) - int(labels[0]) + 1 == len(members)
        numbers = f"{labels[0]} to {labels[-1]}" if in_turn else "-" if labels[0] == "-" else listed(labels)
        rows.append((numbers, together + listed(names), *described))  # type: ignore[arg-type]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(("foreshock watches:", *lines))
