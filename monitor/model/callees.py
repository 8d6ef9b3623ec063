"""Which functions a module's own code calls, read from its code objects: nothing is run.

Layers of one class are alike: what their code calls is read once and remembered until `forget`.
"""

import dis
import functools
import re
import sys
import types
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, Final

import torch
from torch import nn

_DEPTH: Final = 5
"""How many helpers deep a call is followed."""
_PRODUCT: Final = re.compile("matmul|bmm|einsum", re.IGNORECASE)
_SOFTMAX: Final = re.compile("softmax|logsumexp", re.IGNORECASE)
"""Also in the name of a wrapper (XSoftmax.apply, self.matmul_qkv), or by hand (exp of scores less their logsumexp)."""
_ATTENTION: Final = re.compile("Att|(?<![A-Za-z])att|attent|attn|mha|msa|MHA|MSA|ATT")
_QUERIES: Final = re.compile(
    r"(w_?|to_|c_)?(q|qkv|query|queries)(_?(proj|linear|states|layer))?|query_key_value|c_attn|in_proj", re.I
)
"""What people call queries, or the layer that makes them."""
_OF_OTHERS: Final = ("torch", "transformers", "foreshock", "builtins", "functools", "contextlib", "typing")
"""Packages whose helpers are not looked into: those of transformers build masks for every kind of attention."""
_BASES: Final = ("torch.nn.modules.module", "transformers.modeling_utils")
_MANY: Final = 64
"""A container with more entries is data, no table of functions."""


def functions_of(module: nn.Module) -> tuple[FunctionType, ...]:
    """The methods of a module and the functions that it was given, with the helpers that they call."""
    kind: Any = type(module)
    names = _called_on(kind)
    return _reached_from((*_methods(kind), *(f for v in _given(module) for f in _functions_in(v, names))))


def called_by(module: nn.Module) -> frozenset[str]:
    """Every name that its code looks up, and the own name of a function that was imported under another."""
    return _called_by(functions_of(module))


def kept_by(module: nn.Module) -> Iterator[Any]:
    """Every object that the module reaches by what it or its code keeps, and not by a name of a Python module: in an
    attribute, a partial, a default argument, a closure, an entry of a table."""
    kind: Any = type(module)
    yield from attributes_of(module)
    yield from _kept_by_class(kind)
    yield from _kept_by(functions_of(module))


def looked_up_by(module: nn.Module) -> tuple[Any, ...]:
    """What the names in its code are bound to."""
    return _looked_up_by(functions_of(module))


def imported_by(module: nn.Module) -> Iterator[str]:
    """The modules that its code imports when it runs."""
    return (name for function in functions_of(module) for name in _imports(function.__code__))


def forget() -> None:
    """Look at classes and functions anew: what they hold may have changed since they were looked at last."""
    classes = (_methods, _called_on, _used_by_forward, _kept_by_class)
    for remembered in (*classes, _reached_from, _called_by, _looked_up_by, _kept_by):
        remembered.cache_clear()


@functools.cache
def _reached_from(level: tuple[FunctionType, ...]) -> tuple[FunctionType, ...]:
    seen: dict[CodeType, FunctionType] = {}
    for _ in range(_DEPTH + 1):
        deeper: list[FunctionType] = []
        for function in map(_unwrapped, level):
            if function.__code__ not in seen:
                seen[function.__code__] = function
                deeper += _helpers_of(function)
        level = tuple(deeper)
    return tuple(seen.values())


@functools.cache
def _looked_up_by(functions: tuple[FunctionType, ...]) -> tuple[Any, ...]:
    return tuple(value for function in functions for value in _looked_up(function))


@functools.cache
def _called_by(functions: tuple[FunctionType, ...]) -> frozenset[str]:
    return frozenset(name for function in functions for name in _called_names(function))


def _called_names(function: FunctionType) -> Iterator[str]:
    for name in _names(function.__code__):
        yield name
        yield own_name(function.__globals__.get(name))
    for module in _modules_in(function):
        for name in _names(function.__code__):
            yield own_name(vars(module).get(name))
    if "hasattr" not in (names := _names(function.__code__)) or "getattr" in names:
        yield from _strings(function.__code__)  # getattr(F, "...")


@functools.cache
def _kept_by_class(kind: type) -> tuple[Any, ...]:
    return tuple(value for base in kind.__mro__ for whole in vars(base).values() for value in _opened(whole))


@functools.cache
def _kept_by(functions: tuple[FunctionType, ...]) -> tuple[Any, ...]:
    kept: list[Any] = []
    for each in functions:
        tables = (v for v in _looked_up(each) if isinstance(v, functools.partial | dict | list | tuple))
        kept += [*_bound(each), *tables]
    return tuple(value for whole in kept for value in _opened(whole))


def attributes_of(module: nn.Module) -> Iterator[Any]:
    """What a module keeps in its own attributes, without the partials round it."""
    return (value for whole in _given(module) for value in _opened(whole))


def own_name(value: object) -> str:
    """The name that a function was defined under; "" for anything else."""
    name = getattr(value, "__name__", None) if callable(value) else None
    return name if isinstance(name, str) else ""


def is_by_hand(module: nn.Module) -> bool:
    """Whether its code takes a softmax and a matrix product, in one function, in two methods of its own or with a
    softmax that is a module of its own: attention that no function of a library computes."""
    named = any(_ATTENTION.search(kind.__name__) for kind in type(module).__mro__ if kind.__module__ not in _BASES)
    queries = any(_QUERIES.fullmatch(name) for name in (*module._modules.keys(), *module._parameters.keys()))
    if not named and not queries:
        return False
    codes = [function.__code__ for function in functions_of(module)]
    kind: Any = type(module)
    own = [method.__code__ for method in _methods(kind)]
    apart = any(map(_takes_softmax, own)) or any(isinstance(child, nn.Softmax) for child in module.children())
    return any((_takes_softmax(code) or _divides_by_sum(code)) and _multiplies(code) for code in codes) or (
        apart and any(map(_multiplies, own))
    )


@functools.cache
def _takes_softmax(code: CodeType) -> bool:
    return bool(_SOFTMAX.search(" ".join(_names(code))))


def _divides_by_sum(code: CodeType) -> bool:
    names = set(_names(code))
    return {"exp", "sum"} <= names and "cumsum" not in names


@functools.cache
def _multiplies(code: CodeType) -> bool:
    return bool(_PRODUCT.search(" ".join(_names(code)))) or any(
        i.opname == "BINARY_OP" and i.argrepr.startswith("@")
        for part in _with_inner(code)
        for i in dis.get_instructions(part)
    )


@functools.cache
def _methods(kind: type) -> tuple[FunctionType, ...]:
    """The methods of a class, its own and inherited ones, without those that are overridden and not called by super or
    by the name of their class."""
    methods: dict[str, list[FunctionType]] = {}
    over: set[str] = set()
    bases = {"super", *(base.__name__ for base in kind.__mro__[1:] if base.__module__ not in _BASES)}
    for base in kind.__mro__:
        for name, value in vars(base).items() if base.__module__ not in _BASES else ():
            method = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if name in over:
                continue
            if isinstance(method, FunctionType):
                methods.setdefault(name, []).append(method)
            if not isinstance(method, FunctionType) or bases.isdisjoint(_names(method.__code__)):
                over.add(name)
    return tuple(method for found in methods.values() for method in found)


def _given(module: nn.Module) -> Iterator[Any]:
    """What the module holds for its forward that is neither a module nor of nn.Module's own making."""
    kind: Any = type(module)
    used = None if "forward" in vars(module) else _used_by_forward(kind)
    for name, value in vars(module).items():
        if not isinstance(value, nn.Module | torch.Tensor | str | int | float) and (used is None or name in used):
            yield value


@functools.cache
def _used_by_forward(kind: type) -> frozenset[str] | None:
    """Names that a forward and what it calls look up; None where its code is unknown. What else a module holds, for
    example the attention that it had before, is kept for somebody else."""
    methods = _methods(kind)
    used, before = {"forward"}, set[str]()
    while used != before:
        before = used
        for function in _reached_from(tuple(method for method in methods if method.__name__ in before)):
            names = set(_names(function.__code__))
            used = used | names | (_words(function.__code__) if "getattr" in names else set())
    return frozenset(used) if len(used) > 1 else None


@functools.cache
def _called_on(kind: type) -> frozenset[str]:
    """Names that the methods of a class look up: on what its instances hold, among others."""
    return frozenset(name for method in _methods(kind) for name in _names(method.__code__))


def _helpers_of(function: FunctionType) -> Iterator[FunctionType]:
    """Functions, other than those of known libraries, that the code may call."""
    names = set(_names(function.__code__))
    for value in (*_bound(function), *_looked_up(function)):
        for helper in _functions_in(value, names):
            if not _of_others(helper):
                yield helper


def _functions_in(value: Any, names: Iterable[str]) -> Iterator[FunctionType]:
    """The functions that `value` is or holds, where code that looks up `names` can call them."""
    for each in _opened(value):
        if isinstance(each, FunctionType):
            yield each
        elif isinstance(each, type):
            if issubclass(each, torch.autograd.Function):
                yield from (f for f in _methods(each) if f.__name__ == "forward")
            elif not issubclass(each, nn.Module) and not _of_others(each):
                yield from _methods_called(each, names)
        elif not isinstance(each, nn.Module | types.ModuleType | types.BuiltinFunctionType) and not _of_others(
            type(each)
        ):
            yield from _methods_called(type(each), {"__call__", *names})
            yield from _functions_of_a_registry(each)


def _functions_of_a_registry(value: Any) -> Iterator[FunctionType]:
    """The functions in the tables that an object keeps."""
    tables = (each for each in getattr(value, "__dict__", {}).values() if isinstance(each, dict))
    yield from (each for table in tables for each in _opened(table) if isinstance(each, FunctionType))


def _methods_called(kind: type, names: Iterable[str]) -> Iterator[FunctionType]:
    """Methods of these names, and those that they call in turn."""
    methods, wanted = {f.__name__: f for f in _methods(kind)}, set(names)
    while found := wanted.intersection(methods):
        for name in found:
            yield (method := methods.pop(name))
            wanted.update(_names(method.__code__))


def _opened(value: Any) -> Iterator[Any]:
    """`value` itself, without partials and bindings; the entries of a container."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    for each in inner if len(inner) <= _MANY else ():
        while isinstance(each, functools.partial | types.MethodType | staticmethod | classmethod):
            each = each.func if isinstance(each, functools.partial) else each.__func__
        yield getattr(each, "_torchdynamo_inline", each) if isinstance(each, torch.jit.ScriptFunction) else each


def _bound(function: FunctionType) -> Iterator[Any]:
    """What a function's object keeps: its closure and its defaults."""
    yield from (cell.cell_contents for cell in function.__closure__ or () if _is_full(cell))
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _looked_up(function: FunctionType) -> Iterator[Any]:
    """What the names of a function's code are bound to, in its module and in modules that it names."""
    spaces = [function.__globals__, *map(vars, _modules_in(function))]
    return (space[name] for space in spaces for name in _names(function.__code__) if name in space)


def _modules_in(function: FunctionType) -> Iterator[types.ModuleType]:
    imported = (sys.modules.get(name) for name in _imports(function.__code__))
    for value in (*(function.__globals__.get(name) for name in _names(function.__code__)), *imported):
        if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in _OF_OTHERS:
            yield value


def _of_others(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in _OF_OTHERS


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


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions that are written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


@functools.cache
def _imports(code: CodeType) -> tuple[str, ...]:
    instructions = (i for part in _with_inner(code) for i in dis.get_instructions(part))
    return tuple(i.argval for i in instructions if i.opname == "IMPORT_NAME")


@functools.cache
def _names(code: CodeType) -> tuple[str, ...]:
    return tuple(name for part in _with_inner(code) for name in part.co_names)


def _words(code: CodeType) -> set[str]:
    return {constant for part in _with_inner(code) for constant in part.co_consts if isinstance(constant, str)}


@functools.cache
def _strings(code: CodeType) -> tuple[str, ...]:
    constants = (c for part in _with_inner(code) for c in part.co_consts)
    return tuple(c for c in constants if isinstance(c, str) and c.startswith("scaled_dot_product"))
