"""Which weights, or which of their gradients, are not finite: one fused check, made only after something broke."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from foreshock.monitor.model.sharding import is_sharded


@dataclass(frozen=True, slots=True)
class BrokenParameters:
    """Of `total` tensors in the order of the model's modules, `broken` are not finite."""

    broken: int
    total: int
    last: str
    """The last one that is not finite. A backward that breaks reaches what comes before it, and nothing after."""
    after: str
    """The next one, which is finite; empty if there is none."""


def broken_among(named: Iterable[tuple[str, Any]]) -> BrokenParameters | None:
    """The tensors that are not finite, None if all are. Of sharded tensors this process's own part is checked.

    It waits for the device, and holds one number for each tensor.
    """
    names, tensors = [], []
    for name, tensor in named:
        if tensor is None or not tensor.is_floating_point() or tensor.is_sparse or not tensor.numel():
            continue
        names.append(name)
        tensors.append((tensor.to_local() if is_sharded(tensor) else tensor).detach())
    if not tensors:
        return None
    with torch.no_grad():
        sound = [bool(norm.isfinite()) for norm in torch._foreach_norm(tensors, float("inf"))]
    if all(sound):
        return None
    last = max(place for place, is_sound in enumerate(sound) if not is_sound)
    after = names[last + 1] if last + 1 < len(names) else ""
    return BrokenParameters(sound.count(False), len(sound), names[last], after)


def sentence(what: str, found: BrokenParameters) -> str:
    """In words; what: gradients, or weights."""
    if found.broken == found.total:
        return f"All {found.total} {what} are not finite."
    bound = f", and {found.after}, which follows it, is finite" if found.after else ""
    return f"{found.broken} of {found.total} {what} are not finite: the last one is that of {found.last}{bound}."
