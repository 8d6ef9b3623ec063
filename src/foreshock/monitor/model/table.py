"""The table of what attach found: a line for each group of like layers."""

import re
from collections.abc import Sequence
from typing import Final

from foreshock.monitor.model.discovery import Found

_HEAD: Final = ("layer", "attention module", "heads", "key heads", "head dim", "W_Q and W_K", "how it is watched")
_NAMED: Final = 3
"""Members of a group that are named one by one."""


def listed(names: Sequence[str]) -> str:
    """The names of a group, those in the middle left out where there are many."""
    return ", ".join(names) if len(names) <= _NAMED else f"{names[0]}, {names[1]}, ..., {names[-1]}"


def table_of(found: Sequence[Found], how: str) -> str:
    """Modules that differ in their number alone share a line; `how` says how those are watched that are."""
    groups: dict[tuple[str, ...], tuple[tuple[str, ...], list[tuple[str, str]]]] = {}
    number = 0
    for each in found:
        label = "-" if each.problem else str(number)
        number += not each.problem
        name = each.name or "(the model)"
        described = _described(each, how)
        like = (re.sub(r"\d+", "#", name), *described[:-1], re.sub(r"\d+", "#", described[-1]))
        groups.setdefault(like, (described, []))[1].append((label, name))
    rows = [_HEAD]
    for described, members in groups.values():
        labels, names = zip(*members, strict=True)
        together = f"{len(members)} x " if len(members) > 1 else ""
        rows.append((_numbers(labels), together + listed(names), *described))  # type: ignore[arg-type]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(("foreshock watches:", *lines))


def _described(found: Found, how: str) -> tuple[str, ...]:
    sizes = [str(size) if size else "?" for size in (found.heads, found.kv_heads, found.head_dim)]
    if found.projection:
        layout = found.projection.layout + found.projection.gaps(found.first_head)
    else:
        layout = f"norms are not measured: {found.unmeasured or 'it is not watched'}"
    return (*sizes, layout, f"NOTHING: {found.problem}" if found.problem else how)


def _numbers(labels: Sequence[str]) -> str:
    """0 to 31, or 1, 3, ..., 11."""
    if labels[0] == "-":
        return "-"
    first, last = int(labels[0]), int(labels[-1])
    whole = len(labels) > 1 and last - first + 1 == len(labels)
    return f"{first} to {last}" if whole else listed(labels)
