"""The modes of a head, one entry each: whoever knows the modes reads this list.

Every mode computes the same mathematics; they differ in rounding alone. A head may have several: its mode is then the
sum of their flags, and its name their names in the order of the list, joined by a plus sign.
"""

from dataclasses import dataclass
from enum import IntFlag
from functools import reduce
from operator import or_
from typing import Final

from foreshock.contract.environment import meant


class Mode(IntFlag):
    """Flags of a head's mode, one int32 in device memory that each kernel program reads once (house decision 4).

    Flags are part of the wire format and of what is stored: append, never renumber.
    """

    PLAIN = 0
    EXACT_DELTA = 1
    STABLE_SOFTMAX = 2
    PAPER_SOFTMAX = 4
    ROW_CORRECTED = 8
    CENTRED_KEYS = 16
    CENTRED_VALUES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeInfo:
    """What is known of one mode. Its name is the flag's, in small letters."""

    flag: Mode
    does: str
    """In one line, for the page, the command line and the documentation."""
    cures: str
    """What the mode takes away, and what it leaves."""
    ends_rounding_growth: bool = False
    """Whether growth that rounding causes ends under it: a head that has the mode cannot fail from rounding."""
    excludes: Mode = Mode.PLAIN
    """Modes that it takes the place of."""
    escalates_to: Mode = Mode.PLAIN
    """What is added where it did not arrest a head; plain: nothing is left."""
    proposed: bool = False
    """Whether a machine may propose it: not what saved no run."""
    served: bool = True
    """Whether kernels and reference compute it; where not, setting it is refused. Recorded runs may name it."""

    @property
    def name(self) -> str:
        """As people type it."""
        return str(self.flag.name).lower()


MODES: Final = (
    ModeInfo(
        flag=Mode.EXACT_DELTA,
        does="The backward takes delta from O and its saved rounding residual.",
        cures="The bias of delta, which moves all scores of a head together; the rounding of dS stays.",
        ends_rounding_growth=True,
        escalates_to=Mode.ROW_CORRECTED,
        proposed=True,
    ),
    ModeInfo(
        flag=Mode.STABLE_SOFTMAX,
        does="Every row is shifted by an amount of its own, less than a binade, so that its largest P is never 1.",
        cures="The rounding of rows with tied maxima; it saved no run, and is there for comparison.",
        excludes=Mode.PAPER_SOFTMAX | Mode.CENTRED_VALUES,
        escalates_to=Mode.EXACT_DELTA,
    ),
    ModeInfo(
        flag=Mode.PAPER_SOFTMAX,
        does="Rows with tied maxima are shifted by the paper's exact rule (algorithm 3).",
        cures="The rounding of rows with tied maxima; it saved no run, and is there for comparison.",
        excludes=Mode.STABLE_SOFTMAX | Mode.CENTRED_VALUES,
        escalates_to=Mode.EXACT_DELTA,
    ),
    ModeInfo(
        flag=Mode.ROW_CORRECTED,
        does="dQ and delta are corrected by what the row sum of the rounded dS misses of zero.",
        cures="What rounding adds to dQ along the keys a row sees; an offset that has grown already stays.",
        ends_rounding_growth=True,
        proposed=True,
    ),
    ModeInfo(
        flag=Mode.CENTRED_KEYS,
        does="Not computed any more; recorded runs name it. The mean key of each sequence left dQ's rounding errors.",
        cures="What row_corrected cures, but the bias of the keys grew on unseen (lab/NOTEBOOK.md).",
        ends_rounding_growth=True,
        escalates_to=Mode.ROW_CORRECTED,
        served=False,
    ),
    ModeInfo(
        flag=Mode.CENTRED_VALUES,
        does="Not computed any more; recorded runs name it. O got back what rounding P took from it.",
        cures="The rounding of O where values share a large part; it was given beside centred_keys alone.",
        excludes=Mode.STABLE_SOFTMAX | Mode.PAPER_SOFTMAX,
        escalates_to=Mode.ROW_CORRECTED,
        served=False,
    ),
)
"""Every mode but plain, in the order in which a union names them."""

MODE_NAMES: Final = tuple(mode.name for mode in MODES if mode.served)
"""The names that people type, alone or several joined by a plus sign; `plain` stands for none of them."""
DEFAULT_MITIGATION: Final = "row_corrected"
"""What a head is switched to where nobody chose another: what held most runs, early and late (lab/NOTEBOOK.md)."""
MODE_PATTERN: Final = r"plain|({0})(\+({0}))*".format("|".join(mode.name for mode in MODES))
"""Of a mode's name, as a regular expression; exclusions stand in the list."""


def _all_of(modes: "tuple[ModeInfo, ...]") -> Mode:
    return reduce(or_, (mode.flag for mode in modes), Mode.PLAIN)


ROUNDING_ENDS: Final = _all_of(tuple(mode for mode in MODES if mode.ends_rounding_growth))
"""Flags of the modes under which growth by rounding ends."""
_SERVED: Final = _all_of(tuple(mode for mode in MODES if mode.served))
_PROPOSED: Final = _all_of(tuple(mode for mode in MODES if mode.served and mode.proposed))


def modes_in(mode: int) -> tuple[ModeInfo, ...]:
    """The entries that a mode consists of. Raises ValueError for flags that do not exist or exclude each other."""
    found = tuple(each for each in MODES if each.flag & mode)
    if _all_of(found) != mode or any(each.excludes & mode for each in found):
        raise ValueError(f"mode {mode} does not exist; {_allowed()}")
    return found


def mode_name(mode: int) -> str:
    """The name of a mode's flags. Raises ValueError for a combination that does not exist."""
    return "+".join(each.name for each in modes_in(mode)) or "plain"


def parse_mode(name: str) -> Mode:
    """The flags of a mode's name. Raises ValueError with a sentence for a name that does not exist."""
    flags = {each.name: each.flag for each in MODES}
    parts = [] if name == "plain" else name.split("+")
    if unknown := [part for part in parts if part not in flags]:
        hint = meant(unknown[0], MODE_NAMES if len(parts) > 1 else ["plain", *MODE_NAMES])
        raise ValueError(f"mode {name[:64]!r} does not exist; {hint}{_allowed()}")
    mode = reduce(or_, (flags[part] for part in parts), Mode.PLAIN)
    modes_in(mode)
    return mode


def is_mode(name: str) -> bool:
    """Whether a name is known here; an agent newer than its service may report others."""
    try:
        parse_mode(name)
    except ValueError:
        return False
    return True


def check_served(mode: Mode) -> None:
    """Raises ValueError where no kernel computes a part of `mode`."""
    if missing := mode & ~_SERVED:
        served = ", ".join(each.name for each in MODES if each.flag & _SERVED)
        raise ValueError(f"no kernel serves mode {mode_name(missing)}; served are {served}")


def with_mode(mode: int, added: Mode) -> Mode:
    """`mode` with the flags of `added`, which take the place of what they exclude."""
    return Mode(mode) & ~reduce(or_, (each.excludes for each in modes_in(added)), Mode.PLAIN) | added


def stronger(name: str) -> str | None:
    """What may be proposed where `name` did not arrest a head; None where nothing is left, or `name` is unknown."""
    now = parse_mode(name) if is_mode(name) else Mode.PLAIN
    for each in modes_in(now):
        wanted = with_mode(now, each.escalates_to)
        if wanted != now and not each.escalates_to & ~_PROPOSED:
            return mode_name(wanted)
    return None


def served_modes() -> list[Mode]:
    """Every mode that a head may have today, unions included, plain first."""
    found = [Mode.PLAIN]
    for each in MODES:
        if each.flag & _SERVED:
            found += [mode | each.flag for mode in found if not mode & each.excludes]
    return sorted(found)


def _allowed() -> str:
    served = [each for each in MODES if each.served]
    pairs = [(a.name, b.name) for a in served for b in served if a.excludes & b.flag and a.flag < b.flag]
    apart = "; ".join(f"not {one} with {other}" for one, other in pairs)
    return f"allowed are plain, {', '.join(MODE_NAMES)}, and several of them joined by + ({apart})"
