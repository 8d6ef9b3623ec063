"""Levels that no healthy recorded run reached, and wrong rows: passed in one sample, they are reported at once.

Growth needs a past; a model that was loaded already failing, or that fails in its first hundred steps, has none. A
level goes by size, whatever the sign; docs/healthy.md has the healthy ranges. A row of attention that is farther from
its recomputation than rounding explains (kernels/flash_attention/output_check.py) is a wrong kernel's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from foreshock.contract import wire
from foreshock.contract.slots import Floats, Slot, Words, slot_values
from foreshock.monitor.detect.readings import Readings

LEVEL: Final = "level"
"""The signal of a level that was passed."""
KERNEL: Final = "kernel"
"""The signal of an attention that computes wrong rows."""
HEALTHY_SCORE: Final = 521.0
"""The largest |score| of the healthy recorded runs."""
SCORE: Final = 1024.0
"""Largest |score|."""
OFFSET: Final = 100.0
"""|offset|, nats; the healthy ones came to 54."""
FIRST_SCORE: Final = 128.0
"""Largest |score| in the first `FIRST_STEPS` of a run that began below a quarter of it; the healthy ones came to 16."""
FIRST_STEPS: Final = 100
ENTROPY_SHARE: Final = 0.2
"""Mean entropy of rows in parts of log n, the most they could have, of the head with the most. A new model has 0.9 and
more; scores that nobody divided by the root of the head dim have 0.18, and cosine attention at a scale of 100 too."""
ENTROPY: Final = 0.5
"""The same in nats, where log n was not measured; the healthy recorded runs had 5.1."""
_SHARP_SCORE: Final = 10.0
"""A bias leaves little entropy too, whatever the scores; rows that scores make one-hot have them beyond this."""
_LARGEST_HALF: Final = 65504.0
_LARGEST: Final = float(np.finfo(np.float64).max)
"""A distance past it is shown as this: messages hold finite numbers."""
Found = dict[str, wire.Verdict]
"""Warnings by the name of their level or of the layer with wrong rows."""


def passed_levels(
    readings: Readings,
    words: Words,
    heads: Sequence[wire.HeadRef],
    head_dims: Mapping[int, int],
    is_silent: Callable[[int], bool],
    first_score: float,
) -> Found:
    """The levels that a sample passes.

    is_silent: whether the head of a row needs no warning. first_score: the largest |score| of the run's first sample,
    or infinity once its first steps are over.
    """
    scores, found = readings.largest_score, Found()

    def compare(name: str, values: Floats, level: float, what: str, advice: str = "") -> None:
        rows = (values >= level).nonzero()[0].tolist()
        past = [row for row in rows if values[row] < math.inf and not is_silent(row)]
        if past:
            worst = past[int(values[past].argmax())]
            (layer, head), size = heads[worst], float(values[worst])
            others = f" {len(past)} of {len(heads)} heads are past it." if len(past) > 1 else ""
            text = f"Layer {layer} head {head}: {what.format(size)}{others}{advice} "
            seen = {name.removeprefix("first-"): size, "heads": float(len(past))}
            found[name] = _level(name, readings.step, seen, text + _in_16_bits(size, head_dims.get(layer, 0)))

    healthy = "no healthy recorded run reached"
    compare("score", scores, SCORE, f"its largest |score| is {{:,.0f}}; {healthy} {SCORE:,.0f}.")
    if not found and first_score < FIRST_SCORE / 4:
        rose = f"its largest |score| rose to {{:,.0f}} from {first_score:.3g} within the first {FIRST_STEPS} steps"
        advice = " The learning rate is too high, or its warm-up too short."
        compare("first-score", scores, FIRST_SCORE, f"{rose}; {healthy} {FIRST_SCORE:g} so early.", advice)
    offset = np.abs(readings.score_offset)
    compare("offset", offset, OFFSET, f"its scores are shifted by {{:,.0f}} nats as a whole; {healthy} {OFFSET:g}.")

    least = int(scores.argmin())
    if scores[least] < _SHARP_SCORE and words[least, Slot.ENTROPY_ROWS] > 0:
        return found  # one head that is not sharp answers for all
    known = words[:, Slot.ENTROPY_ROWS] > 0
    if np.count_nonzero(known) > 1 and (scores[known] >= _SHARP_SCORE).all():
        slots = Slot.ENTROPY_ROWS, Slot.ENTROPY_SUM, Slot.MOST_ENTROPY_SUM
        rows, sums, most = (slot_values(words, slot)[known] for slot in slots)
        entropy = sums / rows
        if np.where(most > 0, sums < ENTROPY_SHARE * most, (sums > 0) & (entropy < ENTROPY)).all():
            worst = float(entropy.max(initial=0.0))
            text = (
                f"All {len(sums)} measured heads look at about one key each: the entropy of their rows is "
                f"{worst:.2g} nats at most, and no healthy recorded run came near that in all heads. Check the "
                f"scale of the scores and the norms of queries and keys: gradients hardly pass a one-hot attention."
            )
            found["entropy"] = _level("entropy", readings.step, {"entropy": worst, "heads": float(len(sums))}, text)
    return found


def wrong_rows(words: Words, heads: Sequence[wire.HeadRef], step: int) -> Found:
    """Layers whose own attention computes wrong rows, each by its worst head."""
    found: Found = {}
    for counted, measured in (
        (Slot.WRONG_ROWS, Slot.OUTPUT_ERROR_MAX),
        (Slot.WRONG_GRADIENT_ROWS, Slot.GRADIENT_ERROR_MAX),
    ):
        by_layer: dict[int, list[int]] = {}
        for row in words[:, counted].nonzero()[0].tolist():
            by_layer.setdefault(heads[row][0], []).append(row)
        for layer, rows in by_layer.items():
            wrong, checked, errors = (slot_values(words[rows], of) for of in (counted, Slot.CHECKED_ROWS, measured))
            worst, size = int(wrong.argmax()), float(errors.max())
            seen = {"heads": float(len(rows)), measured.name.lower().removesuffix("_max"): min(size, _LARGEST)}
            what = f"{wrong[worst]:.0f} of the compared rows of its gradients or log-sum-exp"
            if counted == Slot.WRONG_ROWS:
                worst = int((wrong / checked).argmax())
                seen["wrong_share"] = float(wrong[worst] / checked[worst])
                what = f"{wrong[worst]:.0f} of {checked[worst]:.0f} compared rows of its attention output"
            own = sum(head[0] == layer for head in heads)
            others = f" {len(rows)} of {own} heads of the layer have such rows." if len(rows) > 1 else ""
            layer, head = heads[rows[worst]]
            name = f"kernel-l{layer}"
            if name not in found:  # the gradient of a wrong output says nothing more
                found[name] = wire.Verdict(
                    id=f"{name}-{step}",
                    step=step,
                    state="raised",
                    severity="critical",
                    layer=layer,
                    head=head,
                    cause="attention kernel",
                    signal=KERNEL,
                    evidence=seen,
                    sentence=f"Layer {layer} head {head}: {what} are wrong, up to {size:.3g} times as far from their "
                    f"recomputation as rounding explains.{others}",
                )
    return found


def _in_16_bits(score: float, head_dim: int) -> str:
    """What scores of this size mean for attention in 16 bits."""
    power = math.floor(math.log2(score))
    steps = 2.0 ** (power - 7), 2.0 ** (power - 10)
    text = f"bfloat16 rounds scores of this size in steps of {steps[0]:g}, float16 in {steps[1]:g}."
    if score * math.sqrt(head_dim) >= _LARGEST_HALF:
        text += " Attention that multiplies in float16 before it scales overflows: use a fused one."
    return text


def _level(name: str, step: int, evidence: dict[str, float], sentence: str) -> wire.Verdict:
    return wire.Verdict(
        id=f"level-{name}-{step}",
        step=step,
        state="raised",
        severity="warning",
        cause="score growth",
        signal=LEVEL,
        evidence=evidence,
        sentence=sentence[:500],
    )
