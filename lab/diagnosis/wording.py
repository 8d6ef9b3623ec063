"""What a diagnosis says in words: where, whether delta carries it, which tokens and features, what to do."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.lab.diagnosis.head_anatomy import HeadAnatomy
from foreshock.lab.diagnosis.verdict import Verdict

_SURE: Final = 3.0
"""Standard errors from which a mean is called one-signed."""
_STANDS_OUT: Final = 3.0
"""A position or feature stands out from this multiple of an even share."""
_DRIFTED_NATS: Final = 3.0
"""As the detectors' offset_level."""
_SHIFTED: Final = ("rounding", "shifted", None)
"""Verdicts under which a grown offset may be taken out, and none."""
_QUESTIONS: Final = {
    "where": "Where",
    "delta": "In delta?",
    "carriers": "Carried by",
    "directions": "Directions",
    "arithmetic": "Rounding",
}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What taking the key bias out of the named heads did to one batch; the weights were put back."""

    origin: str
    added_nats: dict[str, float]
    """mean score that the bias added, by key head"""
    loss_before: float
    loss_after: float


@dataclass(slots=True)
class Diagnosis:
    """What was found. `as_json` gives it whole, `words` in a few lines."""

    sources: list[str]
    named: list[tuple[int, int]]
    courses: list[HeadCourse] = field(default_factory=list)
    anatomies: list[HeadAnatomy] = field(default_factory=list)
    trials: list[Trial | str] = field(default_factory=list)
    """a sentence where the model has no key bias that can be taken out"""
    findings: dict[str, list[str]] = field(default_factory=dict)
    """by question: where, delta, carriers, directions, arithmetic"""
    advice: list[str] = field(default_factory=list)
    verdict: Verdict | None = None
    """None without tensors"""
    notes: list[str] = field(default_factory=list)
    """what a person should know of the weights that were given"""

    def as_json(self) -> str:
        """The whole diagnosis; a number that is not finite is null."""
        return json.dumps(_finite(asdict(self)), indent=2, allow_nan=False) + "\n"


def explain(diagnosis: Diagnosis) -> None:
    """Write findings and advice from the numbers."""
    for question in _QUESTIONS:
        diagnosis.findings[question] = []
    for course in diagnosis.courses:
        diagnosis.findings["where"].append(_where(course))
        diagnosis.findings["delta"].append(_recorded_delta(course))
    for anatomy in diagnosis.anatomies:
        if not diagnosis.courses and diagnosis.verdict is None:
            diagnosis.findings["where"].append(f"{_who(anatomy)}: offset {anatomy.offset:+.1f} nats.")
        diagnosis.findings["delta"] += _measured_delta(anatomy)
        diagnosis.findings["carriers"] += _carriers(anatomy)
        diagnosis.findings["directions"] += _directions(anatomy)
        diagnosis.findings["arithmetic"].append(_arithmetic(anatomy))
    if not diagnosis.anatomies and diagnosis.verdict is None:
        for question in ("carriers", "directions", "arithmetic"):
            diagnosis.findings[question].append(
                "needs tensors: add a checkpoint (foreshock lab run --checkpoint FILE), or module:factory and --state."
            )
    diagnosis.advice = _advice(diagnosis)


def lines(diagnosis: Diagnosis) -> list[tuple[str, list[str]]]:
    """Headings and sentences, in the order of the questions."""
    said = [(title, diagnosis.findings[question]) for question, title in _QUESTIONS.items()]
    first = [] if diagnosis.verdict is None else [("Verdict", [*diagnosis.verdict.words, *diagnosis.notes])]
    return [*first, *((title, sentences) for title, sentences in said if sentences), ("What to do", diagnosis.advice)]


def _who(one: HeadCourse | HeadAnatomy) -> str:
    return f"layer {one.layer} head {one.head}"


def _where(course: HeadCourse) -> str:
    parts = [
        "no warning" if course.warned_step is None else f"warned at step {course.warned_step}, cause {course.cause}"
    ]
    if course.offset is not None:
        moved = "" if course.offset_change is None else f" ({course.offset_change:+.1f} since half of the run)"
        parts.append(f"offset {course.offset:+.1f} nats{moved}")
    if course.largest_score is not None:
        parts.append(f"largest |score| {course.largest_score:.0f}")
    if course.query_norm is not None:
        others = course.query_norm_over_others
        parts.append(
            f"W_Q norm {course.query_norm:.1f}"
            + ("" if others is None else f", {others:.1f}x the median of the others")
        )
    return f"{_who(course)}: {'; '.join(parts)}."


def _recorded_delta(course: HeadCourse) -> str:
    if course.delta_one_sidedness is None or course.delta_z is None or course.delta_same_sign is None:
        return f"{_who(course)}: the run recorded no error of delta."
    sure = abs(course.delta_z) >= _SURE
    return (
        f"{_who(course)}, as recorded: delta_lp - delta_hp is {'one-signed' if sure else 'not one-signed for sure'}, "
        f"{course.delta_one_sidedness:+.3f} of its size on average, {course.delta_z:+.1f} standard errors, "
        f"{course.delta_same_sign:.0%} of the run with that sign. It is what O's rounding would do, used or not."
    )


def _measured_delta(anatomy: HeadAnatomy) -> list[str]:
    said = [
        f"{_who(anatomy)}, {anatomy.batches} batches, {anatomy.numerics} numerics: delta_lp - delta_hp sums to "
        f"{anatomy.one_sidedness:.1%} of its size, {anatomy.bias_z:+.1f} standard errors over batches."
    ]
    share = anatomy.delta_share_of_weight_error
    if anatomy.weight_error_plain is not None and anatomy.weight_error_exact is not None and share is not None:
        said.append(
            f"dW_Q is {_off(anatomy.weight_error_plain)} off its float64 truth, with exact delta "
            f"{_off(anatomy.weight_error_exact)}: delta makes {share:.0%} of the squared error."
        )
    else:
        said.append(
            "dW_Q was not taken apart: queries are turned or normalised after W_Q, or its input is not at hand."
        )
    said.append(
        f"The sum of dK over keys, zero in truth, is {anatomy.key_shift_plain:.1e}, with exact delta "
        f"{anatomy.key_shift_exact:.1e}: delta makes {anatomy.delta_share_of_key_shift:.0%} of its square. Along the "
        f"mean key it pushes by {anatomy.push_plain:+.1f} standard errors, with exact delta {anatomy.push_exact:+.1f}."
    )
    return said


def _off(share: float) -> str:
    return "over 1000%" if share > 10 else f"{share:.2%}"  # a gradient that vanished is off by any multiple


def _carriers(anatomy: HeadAnatomy) -> list[str]:
    position, share = anatomy.top_positions[0]
    even = 1 / anatomy.positions
    top = ", ".join(f"{place} ({part:.1%})" for place, part in anatomy.top_positions)
    stands = f"position {position} stands out" if share > _STANDS_OUT * even else "no position stands out"
    said = [f"{_who(anatomy)}: {stands}; most of |delta error| lies at {top}, an even share being {even:.1%}."]
    top = ", ".join(f"{place} ({part:.0%}, {sign:+.2f})" for place, part, sign in anatomy.top_features)
    stands = "some stand out" if anatomy.top_features[0][1] > _STANDS_OUT / anatomy.features else "none stands out"
    said.append(f"Features of O ({stands} of {anatomy.features}), with share and mean sign of dO (O_lp - O_hp): {top}.")
    return said


def _directions(anatomy: HeadAnatomy) -> list[str]:
    if anatomy.similarity is None:
        return [
            f"{_who(anatomy)}: mean cosine between rows of PK {anatomy.similarity_mixed_keys:.2f}; X is not at hand."
        ]
    across = "" if anatomy.similarity_across is None else f", {anatomy.similarity_across:.2f} across checkpoints"
    said = [
        f"{_who(anatomy)}: mean cosine between (PK)[T]^T X[T] of different tokens {anatomy.similarity:.2f}{across}; "
        f"of PK alone {anatomy.similarity_mixed_keys:.2f}, of X alone {anatomy.similarity_inputs:.2f}. The first "
        f"direction holds {anatomy.spectrum[0]:.0%} of the spectrum, the first four {sum(anatomy.spectrum[:4]):.0%}."
    ]
    if anatomy.weight_coherence_plain is not None and anatomy.weight_error_rank_one is not None:
        said.append(
            f"Summed over batches, dW_Q's squared error is {anatomy.weight_coherence_plain:.1f} times that of "
            f"unrelated errors (identical ones: {anatomy.batches}); rank one holds "
            f"{anatomy.weight_error_rank_one:.0%} of it."
        )
    return said


def _arithmetic(anatomy: HeadAnatomy) -> str:
    def outward(value: float | None) -> str:
        return "not seen" if value is None else f"{value:+.1%} of its size"

    return (
        f"{_who(anatomy)}: {anatomy.tied_rows:.1%} of the rows have several P = 1 and carry "
        f"{anatomy.tied_share_of_error:.1%} of |delta error|; O is rounded away from zero by "
        f"{outward(anatomy.outward_tied)} there, by {outward(anatomy.outward_untied)} elsewhere."
    )


def _advice(diagnosis: Diagnosis) -> list[str]:
    rounding, drifted, other = [], [], []
    said = None if diagnosis.verdict is None else diagnosis.verdict.kind
    for named in diagnosis.named:
        courses = [each for each in diagnosis.courses if (each.layer, each.head) == named]
        anatomies = [each for each in diagnosis.anatomies if (each.layer, each.head) == named]
        if any(each.cause == "rounding" for each in courses) or any(
            abs(each.bias_z) >= _SURE and each.delta_share_of_key_shift >= 0.5 for each in anatomies
        ):
            rounding.append(named)
        elif any(each.warned_step is not None for each in courses):
            other.append(named)
        offsets = [each.offset for each in courses if each.offset is not None] + [each.offset for each in anatomies]
        failing = any(each.warned_step is not None for each in courses) or (not courses and said in _SHIFTED)
        if failing and max(map(abs, offsets), default=0.0) >= _DRIFTED_NATS:
            drifted.append(named)
    advice = [] if diagnosis.verdict is None else list(diagnosis.verdict.advice)
    for layer in sorted({layer for layer, _ in rounding} if diagnosis.courses or said is None else ()):
        chosen = " ".join(f"--head {head}" for at, head in rounding if at == layer)
        advice.append(
            f"Take the rounding out: foreshock switch RUN --layer {layer} {chosen} --mode {DEFAULT_MITIGATION} "
            "--reason diagnosis; or attach with policy=auto."
        )
    if drifted:
        advice.append(
            f"Take out what has grown in {_heads(drifted)}, between two steps, where a bias of the keys reaches "
            "attention unturned: foreshock.lab.training.offset_removal.remove_offset. No probability changes; it "
            "grows again unless its cause is taken out too."
        )
        advice += [_tried(trial) for trial in diagnosis.trials]
    if other:
        advice.append(
            f"{_heads(other)}: the cause is another than rounding. Look at the learning rate, the data and the "
            "gradient norm first; a switch of numerics would not help."
        )
    return advice or ["Nothing: no head was warned about. Keep watching."]


def _tried(trial: Trial | str) -> str:
    if isinstance(trial, str):
        return f"Not so here: {trial}."
    added = ", ".join(f"{nats:+.1f} nats to {head}" for head, nats in trial.added_nats.items())
    return (
        f"Tried at {trial.origin}: the bias of the keys adds {added}; without it the loss of a batch goes from "
        f"{trial.loss_before:.4f} to {trial.loss_after:.4f}."
    )


def _heads(refs: list[tuple[int, int]]) -> str:
    return ", ".join(f"layer {layer} head {head}" for layer, head in refs)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
