"""Detect wrong rows, and levels that healthy recorded runs did not reach; a single sample is enough for a warning.

Growth can only be measured over a past, which does not exist if a model fails when it is loaded or in its first hundred
steps. Levels compare absolute values; docs/healthy.md has the healthy ranges. If a row of attention is farther from its
recomputation than rounding explains (kernels/flash_attention/output_check.py), the attention kernel is wrong.
"""

import math
from collections.abc import Container, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np

from foreshock.contract import wire
from foreshock.contract.slots import Slot, Words, slot_values
from foreshock.monitor.detect.readings import Readings

LEVEL: Final = "level"
"""The signal of a level that was exceeded."""
KERNEL: Final = "kernel"
"""The signal of an attention that computes wrong rows."""
HEALTHY_SCORE: Final = 521.0
"""The largest |score| of the healthy recorded runs."""
SCORE: Final = 1024.0
"""Largest |score|."""
OFFSET: Final = 100.0
"""|offset|, nats; healthy runs reached 54."""
FIRST_SCORE: Final = 128.0
"""Largest |score| in the first `FIRST_STEPS` of a run that began below a quarter of it; healthy runs reached 16."""
FIRST_STEPS: Final = 100
ENTROPY_SHARE: Final = 0.2
"""Mean entropy of rows divided by log n, its maximum, of the head with the most. A new model has at least 0.9; scores
that are not divided by the square root of the head dim give 0.18, as does cosine attention at a scale of 100."""
ENTROPY: Final = 0.5
"""The same in nats, if log n was not measured; the healthy recorded runs had 5.1."""
_SHARP_SCORE: Final = 10.0
"""Rows that become one-hot by their scores have larger scores than this. With a bias, entropy may be low at any
scores."""
_WRONG: Final = (Slot.WRONG_ROWS, Slot.OUTPUT_ERROR_MAX), (Slot.WRONG_GRADIENT_ROWS, Slot.GRADIENT_ERROR_MAX)
"""Numbers of wrong rows, and their largest errors."""
_LARGEST_HALF: Final = 65504.0
_LARGEST: Final = float(np.finfo(np.float64).max)
"""A larger distance is reported as this number, because messages contain only finite numbers."""
_SENTENCES: Final = {
    "score": "its largest |score| is {size:,.0f}; no healthy recorded run reached {level:,.0f}.{others}",
    "first-score": "its largest |score| rose to {size:,.0f} from {first:.3g} within the first {steps} steps; no "
    "healthy recorded run reached {level:g} so early.{others} The learning rate is too high, or its warm-up too short.",
    "offset": "its scores are shifted by {size:,.0f} nats as a whole; no healthy recorded run reached {level:g}."
    "{others}",
}
Found = dict[str, wire.Verdict]
"""Warnings by the name of their level or of the layer with wrong rows."""


def passed_levels(
    readings: Readings,
    words: Words,
    heads: Sequence[wire.HeadRef],
    head_dims: Mapping[int, int],
    silent: Container[int],
    first_score: float,
    latched: Mapping[str, wire.Verdict],
) -> Found:
    """Return a warning for each level that a sample exceeds.

    silent: rows of heads that are not warned about. first_score: the largest |score| of the run's first sample, or
    infinity after its first steps. latched: active warnings, which are returned unchanged.
    """
    scores, offsets, found = readings.largest_score, readings.score_offset, Found()
    offset, score = readings.largest or (np.fmax.reduce(np.abs(offsets)), np.fmax.reduce(scores))
    early = FIRST_SCORE if first_score < FIRST_SCORE / 4 else math.inf
    for name, largest, level in (("score", score, SCORE), ("first-score", score, early), ("offset", offset, OFFSET)):
        if level == math.inf or not largest >= level or (name == "first-score" and found):
            continue
        values = np.abs(offsets) if name == "offset" else scores
        rows = np.flatnonzero((values >= level) & (values < math.inf)).tolist()
        past = [row for row in rows if row not in silent]
        if past and name in latched:
            found[name] = latched[name]
        elif past:
            worst = max(past, key=values.item)
            (layer, head), size = heads[worst], values.item(worst)
            others = f" {len(past)} of {len(heads)} heads are past it." if len(past) > 1 else ""
            what = _SENTENCES[name].format(size=size, level=level, first=first_score, steps=FIRST_STEPS, others=others)
            sentence = f"Layer {layer} head {head}: {what} {_in_16_bits(size, head_dims.get(layer, 0))}"
            seen = {name.removeprefix("first-"): size, "heads": float(len(past))}
            found[name] = _raised(f"level-{name}", readings.step, seen, sentence)

    least = int(scores.argmin())
    if scores[least] < _SHARP_SCORE and words[least, Slot.ENTROPY_ROWS] > 0:
        return found  # one head with small scores is enough to rule out the warning
    known = words[:, Slot.ENTROPY_ROWS].nonzero()[0]
    if len(known) > 1 and (scores[known] >= _SHARP_SCORE).all():
        slots = Slot.ENTROPY_ROWS, Slot.ENTROPY_SUM, Slot.MOST_ENTROPY_SUM
        counts, sums, most = (slot_values(words[known], slot) for slot in slots)
        entropy = sums / counts
        if np.where(most > 0, sums < ENTROPY_SHARE * most, (sums > 0) & (entropy < ENTROPY)).all():
            largest = float(entropy.max())
            sentence = (
                f"All {len(sums)} measured heads look at about one key each: the entropy of their rows is "
                f"{largest:.2g} nats at most, and no healthy recorded run came near that in all heads. Check the "
                f"scale of the scores and the norms of queries and keys: gradients hardly pass a one-hot attention."
            )
            seen = {"entropy": largest, "heads": float(len(sums))}
            found["entropy"] = _raised("level-entropy", readings.step, seen, sentence)
    return found


def wrong_rows(words: Words, heads: Sequence[wire.HeadRef], step: int) -> Found:
    """Return a warning for each layer whose own attention computes wrong rows, about its worst head."""
    found: Found = {}
    for counted, measured in _WRONG:
        if not len(wrong_heads := words[:, counted].nonzero()[0]):
            continue
        for layer, group in groupby(wrong_heads.tolist(), lambda row: heads[row][0]):
            if (name := f"kernel-l{layer}") in found:
                continue  # its output is wrong, so its gradients do not add information
            rows = list(group)
            wrong, checked, errors = (slot_values(words[rows], of) for of in (counted, Slot.CHECKED_ROWS, measured))
            worst, size = int(wrong.argmax()), float(errors.max())
            seen = {"heads": float(len(rows)), measured.name.lower().removesuffix("_max"): min(size, _LARGEST)}
            what = f"{wrong[worst]:.0f} of the compared rows of its gradients or log-sum-exp"
            if counted == Slot.WRONG_ROWS:
                worst = int((wrong / checked).argmax())
                seen["wrong_share"] = float(wrong[worst] / checked[worst])
                what = f"{wrong[worst]:.0f} of {checked[worst]:.0f} compared rows of its attention output"
            own, head = sum(each[0] == layer for each in heads), heads[rows[worst]][1]
            others = f" {len(rows)} of {own} heads of the layer have such rows." if len(rows) > 1 else ""
            sentence = f"Layer {layer} head {head}: {what} are wrong, up to {size:.3g} times as far from their "
            sentence += f"recomputation as rounding explains.{others}"
            at: dict[str, Any] = {"layer": layer, "head": head, "severity": "critical"}
            found[name] = _raised(name, step, seen, sentence, cause="attention kernel", signal=KERNEL, **at)
    return found


def _in_16_bits(score: float, head_dim: int) -> str:
    """Describe what scores of this size mean for attention in 16 bits."""
    power = math.floor(math.log2(score))
    steps = 2.0 ** (power - 7), 2.0 ** (power - 10)
    text = f"bfloat16 rounds scores of this size in steps of {steps[0]:g}, float16 in {steps[1]:g}."
    if score * math.sqrt(head_dim) >= _LARGEST_HALF:
        text += " Attention that multiplies in float16 before it scales overflows: use a fused one."
    return text


def _raised(name: str, step: int, evidence: dict[str, float], sentence: str, **given: Any) -> wire.Verdict:
    """Return a warning, by default about a level; `given` overrides fields of the verdict."""
    fields: dict[str, Any] = {"severity": "warning", "cause": "score growth", "signal": LEVEL} | given
    return wire.Verdict(
        id=f"{name}-{step}", step=step, state="raised", evidence=evidence, sentence=sentence[:500], **fields
    )
