"""Which functions a module's own code calls, read from its code objects: nothing is run."""

import dis
import functools
import re
import types
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, Final

from torch import nn

_DEPTH: Final = 3
"""How many helpers deep a call is followed."""
_PRODUCT: Final = re.compile("matmul|bmm|einsum", re.IGNORECASE)
_SOFTMAX: Final = re.compile("softmax|logsumexp", re.IGNORECASE)
"""Also in the name of a wrapper (XSoftmax.apply, self.matmul_qkv), or by hand (exp of scores less their logsumexp)."""
_OF_OTHERS: Final = ("torch", "transformers", "foreshock", "builtins", "functools", "contextlib", "typing")
"""Packages whose helpers are not looked into: those of transformers build masks for every kind of attention."""
_BASES: Final = ("torch.nn.modules.module", "transformers.modeling_utils")


def functions_of(module: nn.Module) -> Iterator[FunctionType]:
    """The methods of a module and the functions that it was given, with the helpers that they call."""
    seen: set[CodeType] = set()
    for function in (*_methods(type(module)), *_given(module)):
        yield from _with_helpers(function, _DEPTH, seen)


def called_names(function: FunctionType) -> Iterator[str]:
    """Every name that the code looks up, and the own name of a function that was imported under another."""
    for name in _names(function.__code__):
        yield name
        yield from _own_name(function.__globals__.get(name))
    for cell in function.__closure__ or ():
        yield from _own_name(cell.cell_contents if _is_full(cell) else None)


def _own_name(value: object) -> Iterator[str]:
    if callable(value) and isinstance(own := getattr(value, "__name__", None), str):
        yield own


def is_by_hand(module: nn.Module) -> bool:
    """Whether a method takes a softmax and a matrix product: attention that no function of a library computes."""
    if not any(re.search("att", kind.__name__, re.IGNORECASE) for kind in type(module).__mro__):
        return False
    return any(_takes_both(method.__code__) for method in _methods(type(module)))


def _takes_both(code: CodeType) -> bool:
    names = " ".join(_names(code))
    if not _SOFTMAX.search(names):
        return False
    return bool(_PRODUCT.search(names)) or any(
        i.opname == "BINARY_OP" and i.argrepr == "@" for i in dis.get_instructions(code)
    )


def _methods(kind: type) -> Iterator[FunctionType]:
    """The methods of a class, its own and inherited ones, without those that are overridden."""
    methods: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__ not in _BASES:
            methods |= vars(base)
    for value in methods.values():
        value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(value, FunctionType):
            yield value


def _given(module: nn.Module) -> Iterator[FunctionType]:
    """Functions, and objects that are called like functions, which the module holds (a processor of diffusers)."""
    for value in vars(module).values():
        while isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, types.MethodType):
            value = value.__func__
        if isinstance(value, FunctionType):
            yield value
        elif not isinstance(value, nn.Module) and isinstance(call := _call_of(type(value)), FunctionType):
            yield call


def _call_of(kind: type) -> Any:
    return next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)


def _with_helpers(function: FunctionType, depth: int, seen: set[CodeType]) -> Iterator[FunctionType]:
    function = _unwrapped(function)
    if function.__code__ in seen:
        return
    seen.add(function.__code__)
    yield function
    if depth == 0:
        return
    inner = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    named = [function.__globals__.get(name) for name in _names(function.__code__)]
    for helper in (*inner, *named):
        if isinstance(helper, FunctionType) and not str(helper.__module__).startswith(_OF_OTHERS):
            yield from _with_helpers(helper, depth - 1, seen)


def _unwrapped(function: FunctionType) -> FunctionType:
    while isinstance(inner := getattr(function, "__wrapped__", None), FunctionType):
        function = inner
    return function


def _is_full(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
