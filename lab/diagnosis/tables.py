"""A diagnosis as a verdict, two tables and advice: what the run recorded of each head, and what its tensors say."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.lab.diagnosis.head_anatomy import HeadAnatomy
from foreshock.lab.diagnosis.verdict import Verdict

One = TypeVar("One")
Row = tuple[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCourse:
    """One head as its run recorded it; None for what was not recorded."""

    layer: int
    head: int
    warned_step: int | None
    cause: str | None
    offset: float | None
    """nats, mean of the last points"""
    offset_change: float | None
    """since the middle of the run"""
    largest_score: float | None
    delta_one_sidedness: float | None
    """mean over blocks of steps of sum (delta_lp - delta_hp) over sum |delta_lp - delta_hp|, signed"""
    delta_same_sign: float | None
    """share of blocks that have its sign"""
    delta_z: float | None
    """the mean in standard errors"""
    tied_rows: float | None
    """share of rows with several P = 1, last points"""
    query_norm: float | None
    query_norm_over_others: float | None
    """over the median of the other heads"""


@dataclass(slots=True)
class Diagnosis:
    """What was found."""

    sources: list[str]
    named: list[tuple[int, int]]
    courses: list[HeadCourse] = field(default_factory=list)
    anatomies: list[HeadAnatomy] = field(default_factory=list)
    verdict: Verdict | None = None
    """None without tensors"""
    notes: list[str] = field(default_factory=list)
    """what a person should know of the weights that were given"""
    advice: list[str] = field(default_factory=list)


def _number(form: str, value: float | None) -> str:
    return "-" if value is None else format(value, form)


def _pair(form: str, one: float | None, of: str, other: float | None) -> str:
    return "-" if one is None else f"{one:{form}}" + ("" if other is None else f" ({format(other, of)})")


def _top(parts: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"{place} ({share:.0%})" for place, share in parts)


_RECORDED: Final[dict[str, Callable[[HeadCourse], str]]] = {
    "warned at step": lambda c: "no warning" if c.warned_step is None else f"{c.warned_step}, {c.cause}",
    "offset, nats (since half of the run)": lambda c: _pair("+.1f", c.offset, "+.1f", c.offset_change),
    "largest |score|": lambda c: _number(".0f", c.largest_score),
    "norm of W_Q (over the median of others)": lambda c: _pair(".1f", c.query_norm, ".1f", c.query_norm_over_others),
    "error of delta, one-sided (standard errors)": lambda c: _pair("+.3f", c.delta_one_sidedness, "+.1f", c.delta_z),
    "blocks of the run with that sign": lambda c: _number(".0%", c.delta_same_sign),
    "rows with several P = 1": lambda c: _number(".1%", c.tied_rows),
}
_MEASURED: Final[dict[str, Callable[[HeadAnatomy], str]]] = {
    "offset, nats": lambda a: f"{a.offset:+.1f}",
    "error of delta, one-sided (standard errors)": lambda a: _pair("+.3f", a.one_sidedness, "+.1f", a.bias_z),
    "dW_Q off its truth (with exact delta)": lambda a: _pair(".2%", a.weight_error_plain, ".2%", a.weight_error_exact),
    "sum of dK, 0 in truth (with exact delta)": lambda a: _pair(".1e", a.key_shift_plain, ".1e", a.key_shift_exact),
    "delta's share of its square": lambda a: f"{a.delta_share_of_key_shift:.0%}",
    "tokens with most of |delta error|": lambda a: _top(a.top_positions),
    "features of O with most of it": lambda a: _top(a.top_features),
    "rows with several P = 1 (share of |delta error|)": lambda a: _pair(
        ".1%", a.tied_rows, ".1%", a.tied_share_of_error
    ),
    "cosine of directions (the first's share)": lambda a: _pair(".2f", a.similarity, ".0%", a.first_direction),
}


def of_courses(courses: Sequence[HeadCourse]) -> list[Row]:
    """What the run recorded: a row for each quantity, with a cell for each course."""
    return _rows(_RECORDED, courses)


def of_tensors(anatomies: Sequence[HeadAnatomy]) -> list[Row]:
    """What the tensors say: a row for each quantity, with a cell for each head."""
    return _rows(_MEASURED, anatomies)


def _rows(cells: dict[str, Callable[[One], str]], ones: Sequence[One]) -> list[Row]:
    return [(name, [cell(one) for one in ones]) for name, cell in cells.items()] if ones else []


def advise(diagnosis: Diagnosis) -> list[str]:
    """What to do: the verdict's advice, and a switch of every head if rounding was warned about, or where else to look.

    A switch of the warned head alone did not hold (lab/NOTEBOOK.md)."""
    advice = [] if diagnosis.verdict is None else list(diagnosis.verdict.advice)
    warned = {(c.layer, c.head): c.cause for c in diagnosis.courses if c.warned_step is not None}
    if "rounding" in warned.values():
        advice.append(
            f"Take the rounding out of all heads: foreshock switch RUN --mode {DEFAULT_MITIGATION} --reason diagnosis; "
            "or attach with policy=auto."
        )
    if other := sorted(head for head, cause in warned.items() if cause != "rounding"):
        heads = ", ".join(f"layer {layer} head {head}" for layer, head in other)
        advice.append(
            f"{heads}: the cause is another than rounding. Look at the learning rate, the data and the gradient norm "
            "first; a switch of numerics would not help."
        )
    return advice or ["Nothing: no head was warned about. Keep watching."]
