"""The modes of a head, one entry each; all other code about modes is derived from this list.

All modes compute the same mathematics with different rounding. A head may have several modes: its mode is then the sum
of their flags, and its name is their names in the order of the list, joined by a plus sign.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntFlag
from functools import reduce
from operator import or_
from typing import Final

from foreshock.contract.environment import meant


class Mode(IntFlag):
    """Flags of a head's mode, one int32 in device memory that each kernel program reads once (design.md, decision 4).

    Flags are part of the wire format and of stored runs: append, never renumber. 2, 16 and 32 were modes that have been
    removed; recordings contain these numbers.
    """

    PLAIN = 0
    EXACT_DELTA = 1
    PAPER_SOFTMAX = 4
    ROW_CORRECTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeInfo:
    """One mode. Its name is that of its flag, in lower case."""

    flag: Mode
    does: str
    """A description in one line, for the page, the command line and the documentation."""
    cures: str
    """The rounding errors that the mode removes, and those that remain."""
    ends_rounding_growth: bool = False
    """Whether growth that rounding causes ends under it: a head that has the mode cannot fail from rounding."""
    escalates_to: Mode = Mode.PLAIN
    """The mode to add if this one did not arrest a head; plain: there is none."""
    proposed: bool = False
    """Whether foreshock may propose it; False for modes that did not save any run."""

    @property
    def name(self) -> str:
        """The name that people type."""
        return str(self.flag.name).lower()


MODES: Final = (
    ModeInfo(
        flag=Mode.EXACT_DELTA,
        does="Computes delta from O and its saved rounding residual.",
        cures="The bias of delta, which moves all scores of a head together. The rounding of dS stays.",
        ends_rounding_growth=True,
        escalates_to=Mode.ROW_CORRECTED,
        proposed=True,
    ),
    ModeInfo(
        flag=Mode.PAPER_SOFTMAX,
        does="Shifts rows with tied maxima by the paper's exact rule (algorithm 3).",
        cures="The rounding of rows with tied maxima. It saved no run, and exists for comparison.",
        escalates_to=Mode.EXACT_DELTA,
    ),
    ModeInfo(
        flag=Mode.ROW_CORRECTED,
        does="Corrects dQ and delta by the difference between zero and the row sum of the rounded dS.",
        cures="The rounding error of dQ along the keys that a row sees. An offset that has already grown stays.",
        ends_rounding_growth=True,
        proposed=True,
    ),
)
"""Every mode except plain, in the order of their names in a union."""

MODE_NAMES: Final = tuple(mode.name for mode in MODES)
"""The names that people type, also several joined by a plus sign; `plain` means none of them."""
DEFAULT_MITIGATION: Final = "row_corrected"
"""The default mitigation: it saved the most runs, early and late (lab/NOTEBOOK.md)."""
MODE_PATTERN: Final = r"plain|({0})(\+({0}))*".format("|".join(MODE_NAMES))
"""A regular expression for names of modes."""


def _all_of(modes: Iterable[ModeInfo]) -> Mode:
    return reduce(or_, (mode.flag for mode in modes), Mode.PLAIN)


ROUNDING_ENDS: Final = _all_of(mode for mode in MODES if mode.ends_rounding_growth)
"""Flags of the modes under which growth by rounding ends."""
_PROPOSED: Final = _all_of(mode for mode in MODES if mode.proposed)
_ALLOWED: Final = f"allowed are plain, {', '.join(MODE_NAMES)}, and several of them joined by +"


def modes_in(mode: int) -> tuple[ModeInfo, ...]:
    """Return the entries that a mode consists of. Raises ValueError for flags that do not exist."""
    found = tuple(each for each in MODES if each.flag & mode)
    if _all_of(found) != mode:
        raise ValueError(f"mode {mode} does not exist; {_ALLOWED}")
    return found


def mode_name(mode: int) -> str:
    """Return the name of a mode's flags. Raises ValueError for flags that do not exist."""
    return "+".join(each.name for each in modes_in(mode)) or "plain"


def parse_mode(name: str) -> Mode:
    """Return the flags of a mode's name. Raises ValueError for a name that does not exist."""
    flags = {each.name: each.flag for each in MODES}
    parts = [] if name == "plain" else name.split("+")
    if unknown := [part for part in parts if part not in flags]:
        hint = meant(unknown[0], MODE_NAMES if len(parts) > 1 else ["plain", *MODE_NAMES])
        raise ValueError(f"mode {name[:64]!r} does not exist; {hint}{_ALLOWED}")
    return reduce(or_, (flags[part] for part in parts), Mode.PLAIN)


def is_mode(name: str) -> bool:
    """Whether this version knows a mode's name; agents of other versions may report other names."""
    try:
        parse_mode(name)
    except ValueError:
        return False
    return True


def stronger(name: str) -> str | None:
    """Return the mode to propose if `name` did not arrest a head; None if there is none, or `name` is unknown."""
    now = parse_mode(name) if is_mode(name) else Mode.PLAIN
    for each in modes_in(now):
        if each.escalates_to & ~now and not each.escalates_to & ~_PROPOSED:
            return mode_name(now | each.escalates_to)
    return None


def all_modes() -> list[Mode]:
    """Return every mode that a head may have, including unions, plain first."""
    found = [Mode.PLAIN]
    for each in MODES:
        found += [mode | each.flag for mode in found]
    return sorted(found)
