"""Rows of an attention by hand whose softmax gives NaN, as the first backwards show: a mask hid every key of them.

Such an attention is not watched. Its softmax saved what it gave for the backward, where it can be looked at. A tensor
that something else packs, as activation checkpointing does, is left alone.
"""

from typing import Any

import torch
from torch import Tensor

from foreshock.monitor.model.discovery import Executed


def broken_rows(found: Executed) -> tuple[str, bool]:
    """How many rows left the softmax as NaN, and why, as a part of a sentence, empty if none did or it is not known;
    and whether they broke there, since its queries and keys are finite."""
    weights = _saved(found.softmax, "result")
    if weights is None or weights.dim() < 2:
        return "", False
    broken, what = weights.sum(-1).isnan(), "rows"
    if broken.dim() == 3:  # [B, H, S]
        broken, what = broken[:, int(broken.sum((0, 2)).argmax())], "rows of a head"
    if not (count := int(broken.sum())):
        return "", False
    names = ("batch1", "batch2") if "Baddbmm" in type(found.product).__name__ else ("self", "mat2")
    operands = [_saved(found.product, name) for name in names]
    here = all(each is not None and bool(each.isfinite().all()) for each in operands)
    why = "overflows: queries and keys are finite" if here else "is not finite"
    return f"{count} of {broken.numel()} {what} see no key, or hold a score that {why}", here


def _saved(node: Any, name: str) -> Tensor | None:
    """What a node of the graph saved for its backward; None if that is packed, or the node is of another kind."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return kept[0]

    try:
        getattr(node, f"_raw_saved_{name}").register_hooks(pack, lambda tensor: tensor)
    except (AttributeError, RuntimeError):
        return None
    return kept[0] if type(kept[0]) is torch.Tensor else None
