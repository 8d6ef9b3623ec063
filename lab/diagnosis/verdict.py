"""What the rows of a diagnosis mean: a verdict, what else was found, what to do, and a table of the heads in question.

In the head that fails by rounding all scores of a row move together, with one sign over all rows: the part that
softmax cannot see, so that no exact gradient asks for it. Scores that only grew apart, as a learning rate that is too
high makes them, are another failure, which no switch of numerics cures. Findings go by size, not by sign.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.lab.diagnosis.examination import Head, Source
from foreshock.lab.diagnosis.weights import some

_SHIFTED_NATS: Final = 10.0
"""A head's scores have moved as a whole from here on: three times the level from which detectors look at a drift."""
_LARGE_SCORE: Final = 256.0
"""As a critical warning: rounding q and k to bf16 can move a score of this size by two nats."""
_PEAKED_NATS: Final = 0.25
"""Attention of a head is nearly one-hot below: some heads of trained models are, half of all heads are not."""
_PEAKED_SHARE: Final = 0.1
"""And below this share of the entropy of attention that is spread evenly: few keys leave little entropy."""
_GROWTH: Final = 1.2
_SHOWN_HEADS: Final = 4
_ELSEWHERE: Final = "Look at the learning rate, the data and the optimizer first."
_AGAIN: Final = (
    f"Resume from the last checkpoint before the growth with every head on {DEFAULT_MITIGATION}: "
    f'agent.set_mode(agent.modes(), "{DEFAULT_MITIGATION}", reason="diagnosis") before the first step.'
)
_CONFIRM: Final = (
    "To confirm, resume twice from one checkpoint, without and with that line; save both after some hundred steps, "
    "and diagnose --state START --state WITHOUT --state WITH. It is rounding if only WITH stays where START is."
)
CELLS: Final = {
    "warned": ("warned at step", ""),
    "offset": ("offset, nats", "+.1f"),
    "change": ("offset since half of the run", "+.1f"),
    "shift": ("shift of all scores together, nats", "+.1f"),
    "largest": ("largest |score|", ".0f"),
    "entropy": ("entropy of attention, nats", ".2f"),
    "delta": ("error of delta, one-sided", "+.3f"),
    "delta z": ("the same in standard errors", "+.1f"),
    "ties": ("rows with several P = 1", ".1%"),
    "norm": ("norm of W_Q", ".1f"),
    "norm beside others": ("the same over the median head", ".1f"),
    "output error": ("output off float64", ".2%"),
    "query error": ("gradient of queries off float64", ".2%"),
    "key sum": ("sum of the keys' gradient, 0 in truth", ".1e"),
    "empty": ("rows that see no key", ".1%"),
}
"""Rows of the table: title and format by the name of a cell."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is the matter: `kind` for programs, a sentence or two and advice for people, and the heads to look at."""

    kind: str
    words: str
    advice: list[str] = field(default_factory=list)
    heads: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`findings`, the gravest first: its words are the verdict. `heads`: the columns of the table."""

    findings: list[Finding]
    heads: list[Head]
    left_out: list[str]


def diagnose(sources: Sequence[Source], named: Sequence[tuple[int, int]] = ()) -> Diagnosis:
    """Judge the last model of `sources` beside those before it, and every recording; the table shows the `named` heads.

    Raises ValueError for a head that no source has.
    """
    models = [source for source in sources if source.bad_weights is not None]
    recordings = [source for source in sources if source.bad_weights is None]
    findings = [finding for recording in recordings for finding in _of_recording(recording)]
    findings += _of_models(models) if models else []
    calm = [each for each in findings if each.kind in ("quiet", "other")]
    findings = [each for each in findings if each not in calm] or calm
    heads = list(named) or list(dict.fromkeys(head for each in findings for head in each.heads))[:_SHOWN_HEADS]
    rows = [head for source in sources for head in source.heads]
    if not heads and rows:
        farthest = max(rows, key=lambda row: abs(row["offset"]) if math.isfinite(row["offset"]) else 0.0)
        heads = [(farthest.layer, farthest.head)]
    for source in sources:
        known = [(row.layer, row.head) for row in source.heads]
        if missing := [head for head in named if known and head not in known]:
            layer, head = missing[0]
            last = max(number for _, number in known)
            raise ValueError(f"{source.name} has no head {layer}.{head}; it has 0.0 to {max(known)[0]}.{last}")
    shown = [row for head in heads for row in rows if (row.layer, row.head) == head]
    return Diagnosis(findings, shown, [note for source in sources for note in source.notes])


def _of_recording(source: Source) -> list[Finding]:
    warned = [head for head in source.heads if "warned" in head.cells]
    warned.sort(key=lambda head: int(str(head.cells["warned"]).partition(",")[0]))
    rounding = [head for head in warned if str(head.cells["warned"]).endswith("rounding")]
    other = [head for head in warned if head not in rounding]
    found = []
    if rounding:
        advice = (
            f"Take the rounding out of all heads: foreshock switch RUN --mode {DEFAULT_MITIGATION} --reason diagnosis; "
            "or attach with policy=auto."  # a switch of the warned head alone did not hold (lab/NOTEBOOK.md)
        )
        words = f"{source.name}: rounding was warned about, first at step {rounding[0].cells['warned']}, {rounding[0]}."
        found.append(Finding("rounding", words, [advice], _refs(rounding)))
    if other:
        words = f"{source.name}: {some(map(str, other))} had a warning with another cause than rounding."
        found.append(
            Finding("other cause", words, [f"{_ELSEWHERE} A switch of numerics would not help."], _refs(other))
        )
    if not warned:
        found.append(Finding("quiet", f"{source.name}: no head was warned about.", ["Nothing to do: keep watching."]))
    return found


def _of_models(models: Sequence[Source]) -> list[Finding]:
    last = models[-1]
    if last.bad_weights:
        words = (
            f"It cannot be judged from {last.name}: {len(last.bad_weights)} of its parameters hold values that are "
            f"not finite, {some(last.bad_weights)} among them."
        )
        advice = "Give the last checkpoint whose weights are finite, and one from well before."
        return [Finding("not finite", words, [advice])]
    found = []
    if last.broken:
        words = f"The weights of {last.name} are finite, but not all that they compute: {last.broken}."
        found.append(Finding("out of range", words, [_of_broken(last.broken)]))
    found += _hidden_rows(last)
    if not last.heads:
        words = f"The attention of {last.name} was not judged: none of its layers was measured."
        return [
            *found,
            Finding("not judged", words, ["The notes say why; foreshock doctor MODULE:FACTORY says what to change."]),
        ]
    judged = [head for head in last.heads if math.isfinite(head["largest"])]
    shifted = sorted((h for h in judged if abs(h["shift"]) >= _SHIFTED_NATS), key=lambda h: -abs(h["shift"]))
    sharp = sorted((h for h in judged if _apart(h) >= _LARGE_SCORE), key=_apart, reverse=True)
    if shifted and not (sharp and _apart(sharp[0]) > abs(shifted[0]["shift"])):
        found.append(_of_a_shift(shifted, models))
    elif sharp:
        worst = sharp[0]
        words = (
            f"Attention, but something else than this rounding: scores of {worst} reach {worst['largest']:.0f} and "
            f"grew apart from each other; they share {worst['shift']:+.1f} nats.{_others(sharp[1:])}{_size(worst)}"
        )
        advice = f"{_ELSEWHERE} A norm of queries and keys, or a cap on the scores, holds them; a switch of numerics "
        found.append(Finding("sharp", words, [advice + "would not help."], _refs(sharp)))
    peaked = [h for h in judged if h["entropy"] < min(_PEAKED_NATS, _PEAKED_SHARE * h["log keys"])]
    if 2 * len(peaked) >= len(judged) > 0:
        entropy = sum(h["entropy"] for h in peaked) / len(peaked)
        words = (
            f"Attention is nearly one-hot in {len(peaked)} of {len(judged)} heads: their entropy is {entropy:.2f} nats "
            f"on average, and evenly spread it would be {sum(h['log keys'] for h in peaked) / len(peaked):.1f}."
        )
        advice = "Check the scale of the scores and the norms of queries and keys; gradients of such softmax burst."
        found.append(Finding("one-hot", words, [advice], _refs(peaked)))
    return found or [_of_none(judged)]


def _of_none(judged: Sequence[Head]) -> Finding:
    top, off = max(judged, key=lambda h: h["largest"]), max(judged, key=lambda h: h["output error"])
    words = (
        f"Not this rounding: no head has large scores, or scores that moved as a whole. The largest |score| of "
        f"{len(judged)} heads in {len({h.layer for h in judged})} layers is {top['largest']:.1f} ({top})."
    )
    if math.isfinite(off["output error"]):
        words += (
            f" Attention is {off['output error']:.2%} off its float64 truth at most ({off}): two implementations may "
            "differ by as much."
        )
    return Finding("other", words, [f"Run the same steps with attention in float32; if they fail too: {_ELSEWHERE}"])


def _of_broken(broken: str) -> str:
    if "see no key" in broken:
        return "Let every row see a key, at least its own, and leave its loss out."
    if "before the scale" in broken:
        return 'Use scaled_dot_product_attention (attn_implementation="sdpa"), bfloat16, or scale the queries first.'
    if "backward" in broken:
        return (
            "Run the same batch in float32, and with another attention (sdpa_kernel(SDPBackend.MATH)): the change that "
            "makes the gradient finite shows which part is at fault."
        )
    return "Look at the learning rate and at what comes before that place; go back further."


def _hidden_rows(source: Source) -> list[Finding]:
    blind = [head for head in source.heads if head["empty"] > 0]
    if not blind:
        return []
    worst = max(blind, key=lambda head: head["empty"])
    words = (
        f"{worst['empty'] * worst['rows']:.0f} of {worst['rows']:.0f} rows of {worst} see no key, and so in "
        f"{len({head.layer for head in blind})} of {len({head.layer for head in source.heads})} layers: the mask hides "
        "every key from them, as left padding under a causal mask does. Some kernels give NaN for such rows."
    )
    return [Finding("rows that see no key", words, ["Let every row see a key, at least its own, or pad on the right."])]


def _of_a_shift(shifted: Sequence[Head], models: Sequence[Source]) -> Finding:
    worst = shifted[0]
    shift = f"the scores of {worst} lie {worst['shift']:+.1f} nats away as a whole.{_others(shifted[1:])}{_size(worst)}"
    course = [h for source in models for h in source.heads if (h.layer, h.head) == (worst.layer, worst.head)]
    sizes = [abs(each["shift"]) for each in course]
    shifts = ", ".join(f"{each['shift']:+.1f} nats in {each.source}" for each in course)
    if models[-1].exact:
        kind = "float32"
        words = f"Attention is shifted, but as it was run here not by this rounding: it runs in float32. Still, {shift}"
        advice = ["Run the model under the autocast, or in the dtype, of your training, and diagnose again."]
    elif len(course) == 1:
        kind = "shifted"
        words = f"Attention, with the mark of this rounding: {shift} One checkpoint cannot say whether it grows."
        advice = [
            f"Add an earlier checkpoint: --state EARLIER --state THIS. If the shift does not grow: {_ELSEWHERE}",
            _AGAIN,
            _CONFIRM,
        ]
    elif sizes[-1] >= _GROWTH * sizes[0]:
        kind, advice = "rounding", [_AGAIN, _CONFIRM]
        words = f"Attention, most likely this rounding: {shift} It grew: {shifts}."
    elif max(sizes) >= _GROWTH * sizes[0]:
        kind, advice = "came back", [_AGAIN, _ELSEWHERE]
        words = (
            f"Attention: {shift} It grew and is back: {shifts}. If the last one was trained with the switch and the "
            "one before without, it is this rounding."
        )
    else:
        kind, advice = "settled", [_ELSEWHERE]
        words = f"Attention is shifted, but does not grow: {shifts}. Still, {shift} Models may carry a shift unharmed."
    return Finding(kind, words, advice, _refs(shifted))


def _apart(head: Head) -> float:
    """The largest |score| less what all scores share."""
    return head["largest"] - abs(head["shift"])


def _size(head: Head) -> str:
    """What a score of this size means for attention in 16 bits."""
    if (size := head["largest"]) < _LARGE_SCORE:
        return ""
    return f" Queries and keys rounded to bfloat16 can move a score of {size:.0f} by {size / 128:.0f} nats."


def _refs(heads: Sequence[Head]) -> list[tuple[int, int]]:
    return [(head.layer, head.head) for head in heads]


def _others(heads: Sequence[Head]) -> str:
    return f" So do those of {some(map(str, heads))}." if heads else ""
