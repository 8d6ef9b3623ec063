"""Attention of libraries that people call, recognised without importing any of them.

All calls of a library pass through a few objects of its own: `flash_attn_func` ends in `FlashAttnFunc.apply`. Where
these are rebound in the module that holds them, a call is met however its function was imported or is kept. Of a
library's module the forward is rebound, in its class.
"""

import inspect
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn

Make = Literal["flash_attn", "xformers", "transformer_engine", "megatron"]

ORIGINAL: Final = "_foreshock_original"
"""Attribute of what stands in the place of a library's object: that object."""

_FLASH_ATTN: Final = [
    f"FlashAttn{ends}{packed}Func" for ends in ("", "Varlen") for packed in ("", "QKVPacked", "KVPacked")
]
_KNOWN: Final[tuple[tuple[str, frozenset[str], Make], ...]] = (
    # flash_attn from 2.3 on, flash_attn_interface (3), flash_attn.cute (4), and their copies in modules of any name
    *((name, frozenset({"softmax_scale", "causal", "window_size"}), "flash_attn") for name in _FLASH_ATTN),
    ("_memory_efficient_attention", frozenset({"inp", "op"}), "xformers"),
    ("DotProductAttention", frozenset({"query_layer", "qkv_format", "attn_mask_type"}), "transformer_engine"),
    ("DotProductAttention", frozenset({"query", "attention_mask", "packed_seq_params"}), "megatron"),
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
    named = list(inspect.signature(called).parameters.values())[function:]
    arguments = {each.name: None if each.default is each.empty else each.default for each in named}
    makes = (make for name, wanted, make in _KNOWN if name == value.__name__ and wanted <= arguments.keys())
    make = next(makes, None)
    return None if make is None else Entry(make, arguments)


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
