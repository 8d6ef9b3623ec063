"""Incidents in words: the same on the terminal, on the page, in messages and in alerts."""

from collections.abc import Sequence
from typing import Final

from foreshock.contract.decision import IncidentCause
from foreshock.contract.incident_form import IncidentHead

NAMED_HEADS: Final = 3
"""So many are named one by one."""
_WORDS: Final[dict[IncidentCause, str]] = {
    "rounding": "Scores drift as rounding drives them",
    "score growth": "Scores grow, which rounding was not shown to cause,",
    "not finite": "Numbers are not finite",
    "other": "The loss left its track",
}


def sentence(
    cause: IncidentCause,
    heads: Sequence[IncidentHead],
    standing: Sequence[IncidentHead],
    opened: int,
    was: IncidentCause | None,
    corrected: int,
) -> str:
    shown = standing or heads
    said = f"{_WORDS[cause]} in {in_words(shown)}, since step {opened:,}."
    if was is not None:
        said += f" Corrected: until step {corrected:,} this was told as {was}."
    if not standing:
        return f"{said} Quiet since step {max(head.step for head in heads):,}."
    first = shown[0]
    if first.layer is not None and len(shown) > 1:
        said += f" First: {name_of(first)}."
    return said if first.state == "arrested" else said + harm_in_words(first)


def harm_in_words(head: IncidentHead) -> str:
    """When a head's largest |score| reaches 512, as a sentence after another; empty where nobody can say."""
    if head.harm_step is None:
        return " No harm is in sight: on its course it levels off." if head.harm_in_sight is False else ""
    if head.harm_step <= head.step:
        return " Its largest |score| is past 512."
    between = ""
    if head.harm_first_step is not None and head.harm_last_step is not None:
        between = f" ({_round(head.harm_first_step)} to {_round(head.harm_last_step)})"
    elif head.harm_first_step is not None:
        between = f" (not before {_round(head.harm_first_step)})"
    return f" Its largest |score| reaches 512 about step {_round(head.harm_step)}{between}."


def _round(step: int) -> str:
    """A forecast is not known to the step: three digits."""
    unit = 10 ** max(0, len(str(step)) - 3)
    return f"{round(step / unit) * unit:,}"


def name_of(head: IncidentHead) -> str:
    """Layer 0 head 2, in small letters."""
    if head.layer is None:
        return "the whole run"
    return f"layer {head.layer}" + ("" if head.head is None else f" head {head.head}")


def counted(heads: Sequence[IncidentHead]) -> str:
    """How many heads these are; the whole run is none of them."""
    named = sum(head.layer is not None for head in heads)
    whole = ["the whole run"] if named < len(heads) else []
    return " and ".join(whole + [f"{named} head{'s' if named > 1 else ''}"] * (named > 0))


def in_words(heads: Sequence[IncidentHead]) -> str:
    """How many heads of which layers; a few by name."""
    if len(heads) <= NAMED_HEADS:
        return " and ".join(filter(None, [", ".join(map(name_of, heads[:-1])), name_of(heads[-1])]))
    layers = sorted({head.layer for head in heads if head.layer is not None})
    return f"{counted(heads)} of {'layer' if len(layers) == 1 else 'layers'} {_ranges(layers)}"


def _ranges(numbers: Sequence[int]) -> str:
    """0 to 3, 7; at most four parts."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    named = [str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts]
    return ", ".join(named[:4]) + (f" and {len(numbers) - sum(map(len, parts[:4]))} more" if len(named) > 4 else "")
