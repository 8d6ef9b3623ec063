"""Proposes the attention modules of a model by their parts, and describes each one; what runs decides.

No code is read. A number of heads with layers that make queries, or with a class that is called attention, makes a
candidate, whose calls of attention are met. The first step shows which candidates compute attention, and which other
modules do.

All calls of a library pass through a few objects of its own: `flash_attn_func` ends in `FlashAttnFunc.apply`. They are
recognised here without importing any of them.
"""

import inspect
import re
import sys
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
"""Attribute of what stands in the place of a library's object: that object."""

_FLASH_ATTN: Final = [
    f"FlashAttn{ends}{packed}Func" for ends in ("", "Varlen") for packed in ("", "QKVPacked", "KVPacked")
]
_KNOWN: Final[tuple[tuple[str, frozenset[str], Make], ...]] = (
    # flash_attn from 2.3 on, flash_attn_interface (3), flash_attn.cute (4), and their copies in modules of any name
    *((name, frozenset({"softmax_scale", "causal", "window_size"}), "flash_attn") for name in _FLASH_ATTN),
    ("DotProductAttention", frozenset({"query_layer", "qkv_format", "attn_mask_type"}), "transformer_engine"),
)
"""Name of an object, arguments that it has to take (or it is another's of the same name), and whose it is."""
_NAMES: Final = frozenset(name for name, _, _ in _KNOWN)


class Entry(NamedTuple):
    """An object that calls of a library pass through."""

    make: Make
    arguments: dict[str, Any]
    """In order and with their defaults, None for none; "self" of a module's forward."""


def recognised(value: Any) -> Entry | None:
    """What a library's function, torch.autograd.Function or module class is; None for anything else."""
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
    """As `Entry.arguments`, without the first `after`."""
    named = list(inspect.signature(function).parameters.values())[after:]
    return {each.name: None if each.default is each.empty else each.default for each in named}


def entries() -> Iterator[tuple[dict[str, Any] | type, str, Any, Entry]]:
    """(globals of a module or a class, name in it, object, what it is) of every library that is imported."""
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
    """Whose attention module it is; None where it is no library's."""
    found = (recognised(kind) for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return next((entry.make for entry in found if entry is not None), None)


SDPA: Final = torch.nn.functional.scaled_dot_product_attention
"""PyTorch's own function, whatever the name is bound to later."""

_varlen: Final[Any] = getattr(varlen, "varlen_attn", None)
VARLEN: Final[Any] = _varlen if _varlen and "window_size" in inspect.signature(_varlen).parameters else None
"""PyTorch's function for packed sequences; None in a version that has none, or, as 2.10, one of other arguments."""

_flex: Final[Any] = flex.flex_attention
FLEX: Final[Any] = _flex if (_flex.__code__.co_argcount, _flex.__code__.co_kwonlyargcount) == (9, 1) else None
"""PyTorch's function of modified scores and block masks; None in a version of other arguments, as before 2.9."""

_ATTENTION: Final = re.compile("Att|(?<![A-Za-z])att|attent|attn|mha|msa|MHA|MSA|ATT")
"""In the name of a class that computes attention."""
_QUERIES: Final = re.compile(
    r"(w_?|to_|c_)?(q|qkv|query|queries)(_?(proj|linear|states|layer))?|query_key_value|c_attn|in_proj", re.I
)
"""What people call queries, or the layer that makes them."""
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
    """What a call of attention shows of the module that makes it."""

    heads: int
    kv_heads: int
    head_dim: int
    rounds: bool = True
    """Whether its operands are of 16 bits, or taken to them by autocast."""


@dataclass(frozen=True, slots=True)
class Found:
    """One attention module. `problem` says why it cannot be watched; None when it can."""

    name: str
    module: nn.Module
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
    """Whose children make its queries and keys."""
    problem: str | None = None
    certain: bool = False
    """It is attention, whatever the first step calls: PyTorch's module, a library's, or one that the user names."""


def find_attention(
    model: nn.Module, given_heads: Mapping[str, int], called: Mapping[str, Called] | None = None
) -> list[Found]:
    """The modules of `model` that compute attention, in the order of the model's own modules.

    `given_heads` gives the number of heads, by module name. `called`: what a step showed, by the name of each module
    that called attention; None: nothing ran yet, and these are candidates by their parts.
    """
    # .items(): the dictionary of a module that TorchScript compiled cannot be iterated itself
    parents = {f"{name}.{c}" if name else c: m for name, m in model.named_modules() for c, _ in m._modules.items()}
    found: list[Found] = []
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
    """Names of the modules that are to be described; of candidates that lie within each other, the innermost."""
    if called is not None:
        return [name for name, _ in model.named_modules() if name in called]
    chosen: list[str] = []
    libraries: list[str] = []
    attentions: list[str] = []
    for name, module in model.named_modules():
        parts, called_attention = f"{name}." if name else "", is_called_attention(module)
        if name.startswith((*libraries, *(() if called_attention or name in given_heads else attentions))):
            continue  # a part of a library's module, or a helper, as the indexer of DeepSeek-V3.2
        if isinstance(module, nn.MultiheadAttention) or make_of(module) is not None:
            libraries.append(parts)
        elif name not in given_heads and not _looks_like_attention(module):
            continue
        chosen.append(name)
        attentions += [parts] if called_attention else []
    paths = [name.split(".") for name in chosen if name]
    outer = {".".join(path[:length]) for path in paths for length in range(len(path))}
    return [name for name in chosen if name in given_heads or name not in outer]


def _looks_like_attention(module: nn.Module) -> bool:
    """Whether it has a number of heads of its own and weights, or that of its configuration and parts or a name that
    show attention. The first step shows whether it is."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    if _number(module, _HEADS, ()):
        return is_called_attention(module) or next(module.parameters(), None) is not None
    parts = (name for part in (module._modules, module._parameters) for name, _ in part.items())
    return bool(_number(module, _HEADS)) and (is_called_attention(module) or any(map(_QUERIES.fullmatch, parts)))


def is_called_attention(module: nn.Module) -> bool:
    """Whether the name of its class says that it computes attention."""
    return any(_ATTENTION.search(kind.__name__) for kind in type(module).__mro__ if kind.__module__ not in _BASES)


def _describe(
    name: str, module: nn.Module, parent: nn.Module | None, given_heads: int | None, shown: Called | None
) -> Found | None:
    """What its attributes, its weights and a call of it show; None where nothing shows how many heads it has."""
    # an inner module that only calls the kernel (torchtitan's, OLMo-core's) leaves the weights to the module round it
    inner = parent is not None and next(module.parameters(), None) is None
    owner = parent if inner and parent is not None else module
    heads = given_heads or (shown.heads if shown else None) or _number(module, _HEADS) or _number(owner, _HEADS)
    if heads and not given_heads and not shown and make_of(module) == "transformer_engine":
        heads //= _number(module, ("tp_size",)) or 1  # it numbers those of all processes
    if not heads:
        return None
    kv_heads = _number(owner, _KV_HEADS) or _number(module, _KV_HEADS) or 0
    kv_heads = shown.kv_heads if shown is not None and shown.kv_heads < heads else kv_heads
    kv_heads = kv_heads if heads % (kv_heads or heads) == 0 else 0
    head_dim = shown.head_dim if shown is not None else _number(owner, _HEAD_DIM) or 0
    head_dim = sizes_by_width(owner, heads, kv_heads, head_dim)[1]
    if head_dim and (of_all := all_query_heads(owner, head_dim)) > heads:  # it has the number of its own rank's heads
        heads, kv_heads = of_all, of_all * kv_heads // heads
    kv_heads, _ = sizes_by_width(owner, heads, kv_heads, head_dim)
    projection = find_projection(owner, heads, kv_heads or heads, head_dim) if head_dim else None
    kv_heads = kv_heads or (heads if projection is not None else 0)
    why = "" if projection is not None else why_unmeasured(owner)
    return Found(name, module, heads, kv_heads, head_dim, projection=projection, unmeasured=why, owner=owner)


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
    """The first positive integer among these attributes of `holder`, then among those of its attributes `within`."""
    for name in names:
        try:
            value = getattr(holder, name, None)
        except Exception:  # transformers' configurations refuse a number that differs from layer to layer
            value = None
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    configs = (config for each in within if (config := getattr(holder, each, None)) is not None)
    return next((number for config in configs if (number := _number(config, names, ()))), None)


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


_HEAD: Final = ("layer", "attention module", "heads", "key heads", "head dim", "W_Q and W_K", "how it is watched")
_NAMED: Final = 3
"""Members of a group that are named one by one."""


def listed(names: Sequence[str]) -> str:
    """The names of a group, those in the middle left out where there are many."""
    return ", ".join(names) if len(names) <= _NAMED else f"{names[0]}, {names[1]}, ..., {names[-1]}"


def table_of(found: Sequence[Found], layouts: Iterable[str], how: str) -> str:
    """Modules that differ in their number alone share a line; of those that are watched `layouts` say where W_Q and W_K
    lie, and `how` how they are watched."""
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
