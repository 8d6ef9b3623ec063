"""Objects that hold a function which is watched, other than the module that defines or imports it.

`{"sdpa": F.scaled_dot_product_attention}` calls PyTorch's function however its name is bound. So each such object is
given ours while an agent is attached: a registry, a list, a namespace, an instance, a class, a closure or a partial.
"""

import gc
import sys
from collections.abc import Iterator
from functools import partial
from types import CellType
from typing import Any

Holder = dict[Any, Any] | list[Any] | type | CellType | partial[Any]
_LEFT_ALONE = ("torch.", "foreshock.")
"""Instances of classes of these packages, as the nodes of a traced graph, are not changed."""


def held(space: Holder, name: Any) -> Any:
    """What `space` holds there; None where it holds nothing."""
    if isinstance(space, dict):
        return space.get(name)
    if isinstance(space, list):
        return space[name] if name < len(space) else None
    if isinstance(space, type):
        return vars(space).get(name)
    return getattr(space, name, None)


def of_holder(space: Holder, function: Any) -> Any:
    """`function` as `space` holds it: in a class it must not become a method."""
    return staticmethod(function) if isinstance(space, type) else function


def put(space: Holder, name: Any, value: Any) -> None:
    """Let `space` hold `value` there."""
    if isinstance(space, dict | list):
        space[name] = value
    elif isinstance(space, partial):
        space.__setstate__((value, space.args, space.keywords, vars(space)))  # type: ignore[attr-defined]
    else:
        setattr(space, name, value)


def holders_of(*functions: Any) -> Iterator[tuple[Holder, Any, Any]]:
    """(holder, name in it, function) of every object that holds one of `functions`; a class may hold it in a
    staticmethod. Globals of modules are not among them; a function that is None is nowhere."""
    functions = tuple(function for function in functions if function is not None)
    wanted = set(map(id, functions))
    globals_ = {id(getattr(module, "__dict__", None)) for module in list(sys.modules.values())}
    in_classes: list[Any] = []
    for holder in gc.get_referrers(*functions):
        if isinstance(holder, CellType):
            yield holder, "cell_contents", holder.cell_contents
        elif isinstance(holder, partial):
            if not holder.args:  # one that was given operands is a call under way
                yield holder, "func", holder.func
        elif isinstance(holder, list):
            yield from ((holder, at, value) for at, value in enumerate(holder) if id(value) in wanted)
        elif isinstance(holder, dict | staticmethod):
            if id(holder) not in globals_:
                in_classes.append(holder)
        elif not type(holder).__module__.startswith(_LEFT_ALONE):
            yield from _values(getattr(holder, "__dict__", None), wanted)
    if not in_classes:
        return
    classes = _owners(in_classes)  # a scan of every object, so it is made once
    for holder in in_classes:
        if isinstance(holder, dict) and not any(vars(kind).keys() == holder.keys() for kind in classes):
            yield from _values(holder, wanted)
    for kind in classes:
        for name, value in list(vars(kind).items()):
            function = value.__func__ if isinstance(value, staticmethod) else value
            if id(function) in wanted and not kind.__module__.startswith(_LEFT_ALONE):
                yield kind, name, function


def _owners(holders: list[Any]) -> list[type]:
    """The classes whose names lie in one of these dictionaries, or that hold one of these staticmethods."""
    found = gc.get_referrers(*holders)
    spaces = [each for each in found if isinstance(each, dict)]
    kinds = (each for each in (*found, *(gc.get_referrers(*spaces) if spaces else ())) if isinstance(each, type))
    return list(dict.fromkeys(kinds))


def _values(space: Any, wanted: set[int]) -> Iterator[tuple[Holder, Any, Any]]:
    if isinstance(space, dict):
        yield from ((space, name, value) for name, value in list(space.items()) if id(value) in wanted)
