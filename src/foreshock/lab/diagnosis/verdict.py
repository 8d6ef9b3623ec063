"""Interpret the measurements of a diagnosis: findings, with advice and the heads concerned.

In a head that fails by rounding, all scores of a row move together, with the same sign in all rows. Softmax cannot see
this common part, so exact gradients do not change it. Scores that only grow apart, for example because of a too high
learning rate, are another failure, which a switch of numerics does not cure. Findings depend on the size of a shift,
not on its sign.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.lab.diagnosis.examination import Head, Source
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE
from foreshock.monitor.model.discovery import listed

_SHIFTED_NATS: Final = 10.0
"""Smallest shift of all scores of a head that is a finding: three times the level at which detectors see a drift."""
_LARGE_SCORE: Final = 256.0
"""The level of a critical warning: rounding q and k to bf16 can move a score of this size by two nats."""
_FAR_NATS: Final = 60.0
"""Among published recordings without a warning, only those that began from a failed model have such an offset."""
_PEAKED_NATS: Final = 0.25
"""Entropy below which a head is nearly one-hot; in healthy trained models, that is less than half of all heads."""
_PEAKED_SHARE: Final = 0.1
"""The entropy must also be below this fraction of that of uniform attention, which is small if a row sees few keys."""
_GROWTH: Final = 1.2
_SHOWN_HEADS: Final = 4
_ELSEWHERE: Final = "Look at the learning rate, the data and the optimizer first."
_NO_SWITCH: Final = "A switch of numerics would not help."
_BLIND_ROWS: Final = "Let every row see at least its own key, and exclude padding from the loss; or pad on the right."
_AGAIN: Final = (
    f"Resume from the last checkpoint before the growth with every head on {DEFAULT_MITIGATION}: "
    f'agent.set_mode(agent.modes(), "{DEFAULT_MITIGATION}", reason="diagnosis") before the first step.'
)
_CONFIRM: Final = (
    "To confirm, resume twice from one checkpoint, without and with that line; save both after some hundred steps, "
    "and diagnose --state START --state WITHOUT --state WITH. It is rounding if only WITH stays where START is."
)
_BROKEN: Final = {
    "see no key": _BLIND_ROWS,
    "before the scale": 'Use SDPA (attn_implementation="sdpa"), bfloat16, or scale the queries first.',
    "in the backward": "Run the same batch in float32, and with another attention (sdpa_kernel(SDPBackend.MATH)): the "
    "change that makes the gradient finite shows which part is at fault.",
    "": "Look at the learning rate and at what comes before that place; go back further.",
}
"""Advice about the first non-finite value, by a part of its description."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: `kind` for programs, `words` and `advice` for people, and the heads to look at."""

    kind: str
    words: str
    advice: Sequence[str]
    heads: Sequence[Head] = ()


def diagnose(sources: Sequence[Source]) -> list[Finding]:
    """Judge each recording, and the last model of `sources` compared with the earlier ones; the most severe first."""
    models = [source for source in sources if source.bad_weights is not None]
    findings = [each for source in sources if source.bad_weights is None for each in _of_recording(source)]
    findings += _of_models(models) if models else []
    return [each for each in findings if each.kind not in ("quiet", "other")] or findings


def shown_heads(sources: Sequence[Source], findings: Sequence[Finding]) -> list[Head]:
    """Return the rows of the findings' heads in every source, or of the head with the largest offset."""
    rows = [head for source in sources for head in source.heads]
    farthest = sorted(rows, key=lambda row: -abs(row.cells.get("offset", 0.0)))[:1]
    heads = [head for each in findings for head in each.heads] or farthest
    places = list(dict.fromkeys(head.place for head in heads))[:_SHOWN_HEADS]
    return [row for place in places for row in rows if row.place == place]


def _of_recording(source: Source) -> Iterator[Finding]:
    warned = sorted(((*head.warned, head) for head in source.heads if head.warned), key=lambda each: each[0])
    far = [head for head in source.heads if abs(head["offset"]) >= _FAR_NATS or head["largest"] >= DANGEROUS_SCORE]
    if source.broken:
        advice = (
            "Diagnose the last checkpoint from before that step, on the batch that failed: module:factory with --state."
        )
        yield Finding("not finite", f"{source.name}: {source.broken}", (advice,))
    if far and not warned:
        words = f"{source.name}: no head was warned about, but scores of {_list(far)} are far from zero. The first has"
        words += f" an offset of {far[0]['offset']:+.1f} nats.{_moved(far[0])}"
        advice = "If attention runs in 16 bits, diagnose a checkpoint of it: module:factory with --state."
        yield Finding("large", words, (advice,), far)
    elif not warned and not source.broken:
        yield Finding("quiet", f"{source.name}: no head was warned about.", ("Nothing to do: keep watching.",))
    if dated := [(step, head) for step, cause, head in warned if cause == "rounding"]:
        rounding = [head for _, head in dated]
        words = f"{source.name}: rounding was warned about, first at step {dated[0][0]}: {_list(rounding)}."
        # switching only the warned head did not stop the failure (lab/NOTEBOOK.md)
        switch = f"foreshock switch RUN --mode {DEFAULT_MITIGATION} --reason diagnosis; or attach with policy=auto."
        yield Finding("rounding", words, (f"Take the rounding out of all heads: {switch}",), rounding)
    if other := [head for _, cause, head in warned if cause != "rounding"]:
        words = f"{source.name}: {_list(other)} had a warning with another cause than rounding."
        yield Finding("other cause", words, (f"{_ELSEWHERE} {_NO_SWITCH}",), other)


def _of_models(models: Sequence[Source]) -> list[Finding]:
    last = models[-1]
    if last.bad_weights:
        words = (
            f"It cannot be judged from {last.name}: {len(last.bad_weights)} of its parameters hold values that are "
            f"not finite: {listed(last.bad_weights)}."
        )
        advice = "Give the last checkpoint whose weights are finite, and an earlier one."
        return [Finding("not finite", words, (advice,))]
    found = list[Finding]()
    if last.broken:
        words = f"The weights of {last.name} are finite, but not all that they compute: {last.broken}."
        found.append(
            Finding("out of range", words, tuple(do for said, do in _BROKEN.items() if said in last.broken)[:1])
        )
    judged = last.heads
    if not judged:
        words = f"The attention of {last.name} was not judged: none of its layers was measured."
        advice = "The notes say why; foreshock doctor MODULE:FACTORY says what to change."
        return [*found, Finding("not judged", words, (advice,))]
    layers = {head.layer for head in judged}
    if blind := [head for head in judged if head["empty"] > 0]:
        worst = max(blind, key=lambda head: head["empty"])
        words = (
            f"{worst['empty'] * worst['rows']:.0f} of {worst['rows']:.0f} rows of {worst} see no key, and so in "
            f"{len({head.layer for head in blind})} of {len(layers)} layers: the mask hides every key from them, as "
            "left padding under a causal mask does. Some kernels give NaN for such rows."
        )
        found.append(Finding("rows that see no key", words, (_BLIND_ROWS,)))
    shifted = sorted((h for h in judged if abs(h["shift"]) >= _SHIFTED_NATS), key=lambda h: -abs(h["shift"]))
    sharp = sorted((h for h in judged if _apart(h) >= _LARGE_SCORE), key=_apart, reverse=True)
    if shifted and not (sharp and _apart(sharp[0]) > abs(shifted[0]["shift"])):
        found.append(_of_a_shift(shifted, models))
    elif sharp:
        words = (
            f"Attention, but something else than this rounding: scores of {_list(sharp)} grew apart from each other. "
            f"They reach {sharp[0]['largest']:.0f} and share {sharp[0]['shift']:+.1f} nats.{_moved(sharp[0])}"
        )
        advice = f"{_ELSEWHERE} To limit the scores, normalise queries and keys, or cap the scores. {_NO_SWITCH}"
        found.append(Finding("sharp", words, (advice,), sharp))
    peaked = [h for h in judged if h["entropy"] < min(_PEAKED_NATS, _PEAKED_SHARE * h["even entropy"])]
    if 2 * len(peaked) >= len(judged):
        entropy, even = (sum(h[name] for h in peaked) / len(peaked) for name in ("entropy", "even entropy"))
        words = (
            f"Attention is nearly one-hot in {len(peaked)} of {len(judged)} heads: their entropy is {entropy:.2f} nats "
            f"on average, and evenly spread it would be {even:.1f}."
        )
        advice = "Check the scale of scores and the norms of queries and keys; gradients of such a softmax can burst."
        found.append(Finding("one-hot", words, (advice,), peaked))
    if found:
        return found
    top = max(judged, key=lambda h: h["largest"])
    words = (
        f"Not this rounding: no head has large scores, or scores that moved as a whole. The largest |score| of "
        f"{len(judged)} heads in {len(layers)} layers is {top['largest']:.1f} ({top})."
    )
    if off := max((h["output error"] for h in judged if "output error" in h.cells), default=0.0):
        words += f" Attention differs from float64 by at most {off:.2%}: two implementations may differ by as much."
    advice = f"Run the same steps with attention in float32; if they fail too: {_ELSEWHERE}"
    return [Finding("other", words, (advice,))]


def _of_a_shift(shifted: Sequence[Head], models: Sequence[Source]) -> Finding:
    """Interpret a shift of all scores of some heads, by its size in each checkpoint."""
    worst = shifted[0]
    shift = f"the scores of {_list(shifted)} moved as a whole, by {worst['shift']:+.1f} nats.{_moved(worst)}"
    course = [head for source in models for head in source.heads if head.place == worst.place]
    sizes = [abs(each["shift"]) for each in course]
    shifts = ", ".join(f"{each['shift']:+.1f} nats in {each.source}" for each in course)
    advice: Sequence[str]
    if models[-1].exact:
        kind, words = (
            "float32",
            f"Attention is shifted, but not by this rounding, because it ran in float32 here: {shift}",
        )
        advice = ("Run the model under the autocast, or in the dtype, of your training, and diagnose again.",)
    elif len(course) == 1:
        kind = "shifted"
        words = f"Attention, with the mark of this rounding: {shift} One checkpoint cannot say whether it grows."
        first = f"Add an earlier checkpoint: --state EARLIER --state THIS. If the shift does not grow: {_ELSEWHERE}"
        advice = (first, _AGAIN, _CONFIRM)
    elif sizes[-1] >= _GROWTH * sizes[0]:
        kind, words = "rounding", f"Attention, most likely this rounding: {shift} It grew: {shifts}."
        advice = (_AGAIN, _CONFIRM)
    elif max(sizes) >= _GROWTH * sizes[0]:
        kind, advice = "came back", (_AGAIN, _ELSEWHERE)
        words = (
            f"Attention: {shift} It grew and is back: {shifts}. If the last one was trained with the switch and the "
            "one before without, it is this rounding."
        )
    else:
        kind, advice = "settled", (_ELSEWHERE,)
        words = (
            f"Attention is shifted, but the shift does not grow: {shifts}. Many healthy models have one. Here {shift}"
        )
    return Finding(kind, words, advice, shifted)


def _apart(head: Head) -> float:
    """The largest |score| minus the shift that all scores have in common."""
    return head["largest"] - abs(head["shift"])


def _moved(head: Head) -> str:
    """Return a sentence on how far rounding moves the head's largest score; empty for small scores."""
    size = head["largest"]
    moves = f" Queries and keys rounded to bfloat16 can move a score of {size:.0f} by {size / 128:.0f} nats."
    return moves if size >= _LARGE_SCORE else ""


def _list(heads: Sequence[Head]) -> str:
    return listed([str(head) for head in heads])
