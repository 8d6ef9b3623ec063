"""Levels that no healthy recorded run reached, and wrong rows: passed in one sample, they are reported at once.

Growth needs a past; a model that was loaded already failing, or that fails in its first hundred steps, has none. A
level goes by size, whatever the sign. docs/detectors.md has the healthy ranges and the margins. A row of attention that
is farther from its recomputation than rounding explains (kernels/flash_attention/output_check.py) is a wrong kernel's.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from foreshock.contract import wire
from foreshock.contract.slots import Floats, Slot, Words, slot_values

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


class Passed(NamedTuple):
    """A level that heads have passed, or a layer with wrong rows."""

    name: str
    evidence: dict[str, float]
    sentence: str
    wrong: wire.HeadRef | None = None
    """the worst head of a layer with wrong rows"""


@dataclass(slots=True, kw_only=True)
class PassedLevels:
    """What is remembered of levels; saved with the checkpoint."""

    first_score: float | None = None
    """the largest |score| of the run's first sample"""
    first_step: int = 0
    active: dict[str, tuple[wire.Verdict, int]] = field(default_factory=dict)
    """by level: its warning, and the last step that passed it"""


def warned_before(active: Iterable[wire.Verdict], said: Iterable[wire.Verdict]) -> set[wire.HeadRef]:
    """The heads that need no warning about a level: one about them is active that the sample did not raise."""
    new = {verdict.id for verdict in said if verdict.state == "raised"}
    old = [verdict for verdict in active if verdict.id not in new]
    return {(each.layer, each.head) for each in old if each.layer is not None and each.head is not None}


_LARGEST: Final = float(np.finfo(np.float64).max)
"""A distance past it is shown as this: messages hold finite numbers."""


class Levels:
    """Holds the levels that are passed now. layers: those that the agent watches; computed_by: what computes the
    attention of each, as the end of a sentence."""

    def __init__(
        self, layers: Sequence[wire.Layer], quiet_steps: int, computed_by: Callable[[int], str] = lambda layer: ""
    ) -> None:
        self._computed_by: Final = computed_by
        self._heads: Final = wire.head_refs(layers)
        self._dims: Final = {layer.layer: layer.head_dim for layer in layers}
        self._quiet_steps: Final = quiet_steps
        self.passed = PassedLevels()

    def verdicts(self, step: int, words: Words, warned: Collection[wire.HeadRef]) -> list[wire.Verdict]:
        """Warnings that this sample raises or clears. warned: heads that the detectors warn about, which need none."""
        made = []
        active = self.passed.active
        for passed in (*self._wrong(words), *self._passed(step, words, warned)):
            known = active.get(passed.name)
            if known is None:
                made.append(self._verdict(step, passed))
            active[passed.name] = (made[-1] if known is None else known[0], step)
        for name, (verdict, last) in list(active.items()):
            if step - last >= self._quiet_steps:
                del active[name]
                what = "passed this level" if verdict.signal == LEVEL else "had a wrong row"
                sentence = f"No head has {what} for {step - last} steps."
                made.append(verdict.model_copy(update={"step": step, "state": "cleared", "sentence": sentence}))
        return made

    def _passed(self, step: int, words: Words, warned: Collection[wire.HeadRef]) -> list[Passed]:
        rows, entropy_rows = slot_values(words, Slot.ROWS), slot_values(words, Slot.ENTROPY_ROWS)
        score = np.fmax(slot_values(words, Slot.ROW_MAX_ABS), slot_values(words, Slot.SCORE_MAX))
        with np.errstate(divide="ignore", invalid="ignore"):
            offset = np.abs(slot_values(words, Slot.SCORE_OFFSET_SUM) / rows)
            entropy = slot_values(words, Slot.ENTROPY_SUM) / entropy_rows
        score[~np.isfinite(score)] = offset[~np.isfinite(offset)] = 0.0
        if not (rows > 0).any():
            return []
        first = self.passed
        if first.first_score is None:
            first.first_score, first.first_step = float(score.max()), step
        silent = np.array([head in warned for head in self._heads], dtype=np.bool_)
        found: list[Passed] = []
        young = step - first.first_step < FIRST_STEPS and first.first_score < FIRST_SCORE / 4
        for name, values, level in (
            ("score", score, SCORE),
            ("first-score", score, FIRST_SCORE if young else math.inf),
            ("offset", offset, OFFSET),
        ):
            past = np.flatnonzero((values >= level) & ~silent)
            if past.size and not (name == "first-score" and found):
                heads = past[np.argsort(-values[past])].tolist()
                seen = {name.removeprefix("first-"): float(values[heads[0]]), "heads": float(len(heads))}
                found.append(Passed(name, seen, self._words(name, values, heads)))
        known = entropy_rows > 0
        measured, worst = int(known.sum()), float(entropy[known].max(initial=0.0))
        most = slot_values(words, Slot.MOST_ENTROPY_SUM)[known]
        sums = slot_values(words, Slot.ENTROPY_SUM)[known]
        is_low = np.where(most > 0, sums < ENTROPY_SHARE * most, (sums > 0) & (entropy[known] < ENTROPY))
        if measured > 1 and is_low.all() and (score[known] >= _SHARP_SCORE).all():
            text = (
                f"All {measured} measured heads look at about one key each: the entropy of their rows is "
                f"{worst:.2g} nats at most, and no healthy recorded run came near that in all heads. Check the "
                f"scale of the scores and the norms of queries and keys: gradients hardly pass a one-hot attention."
            )
            found.append(Passed("entropy", {"entropy": worst, "heads": float(measured)}, text))
        return found

    def _wrong(self, words: Words) -> list[Passed]:
        """Layers whose own attention computes wrong rows, each by its worst head."""
        wrong, checked = slot_values(words, Slot.WRONG_ROWS), slot_values(words, Slot.CHECKED_ROWS)
        share = np.divide(wrong, checked, out=np.zeros_like(wrong), where=checked > 0)
        gradients = slot_values(words, Slot.WRONG_GRADIENT_ROWS)
        found: dict[int, Passed] = {}
        for extent, slot in ((share, Slot.OUTPUT_ERROR_MAX), (gradients, Slot.GRADIENT_ERROR_MAX)):
            errors = slot_values(words, slot)
            for layer, rows in self._worst_first(extent).items():
                if layer in found:
                    continue  # the gradient of a wrong output says nothing more
                worst, size = rows[0], float(errors[rows].max())
                seen = {"heads": float(len(rows)), slot.name.lower().removesuffix("_max"): min(size, _LARGEST)}
                what = f"{gradients[worst]:.0f} of the compared rows of its gradients or log-sum-exp"
                if slot == Slot.OUTPUT_ERROR_MAX:
                    seen["wrong_share"] = float(share[worst])
                    what = f"{wrong[worst]:.0f} of {checked[worst]:.0f} compared rows of its attention output"
                of = sum(head[0] == layer for head in self._heads)
                others = f" {len(rows)} of {of} heads of the layer have such rows." if len(rows) > 1 else ""
                text = (
                    f"Layer {layer} head {self._heads[worst][1]}: {what} are wrong, up to {size:.3g} times as far from "
                    f"their recomputation as rounding explains.{others}{self._computed_by(layer)}"
                )
                found[layer] = Passed(f"kernel-l{layer}", seen, text, self._heads[worst])
        return list(found.values())

    def _worst_first(self, wrong: Floats) -> dict[int, list[int]]:
        """By layer the heads that have any, those with the most first."""
        by_layer: dict[int, list[int]] = {}
        for row in np.flatnonzero(wrong > 0).tolist():
            by_layer.setdefault(self._heads[row][0], []).append(row)
        return {layer: sorted(rows, key=lambda row: -wrong[row]) for layer, rows in by_layer.items()}

    def _words(self, name: str, values: Floats, heads: list[int]) -> str:
        (layer, head), worst = self._heads[heads[0]], float(values[heads[0]])
        others = f" {len(heads)} of {len(values)} heads are past it." if len(heads) > 1 else ""
        if name == "offset":
            what = (
                f"its scores are shifted by {worst:,.0f} nats as a whole; no healthy recorded run reached {OFFSET:g}."
            )
        elif name == "score":
            what = f"its largest |score| is {worst:,.0f}; no healthy recorded run reached {SCORE:,.0f}."
        else:
            what = (
                f"its largest |score| rose to {worst:,.0f} from {self.passed.first_score or 0.0:.3g} within the first "
                f"{FIRST_STEPS} steps; no healthy recorded run reached {FIRST_SCORE:g} so early."
            )
            others += " The learning rate is too high, or its warm-up too short."
        return f"Layer {layer} head {head}: {what}{others} {self._in_16_bits(layer, worst)}"

    def _in_16_bits(self, layer: int, score: float) -> str:
        """What scores of this size mean for attention in 16 bits."""
        power = math.floor(math.log2(score))
        steps = 2.0 ** (power - 7), 2.0 ** (power - 10)
        text = f"bfloat16 rounds scores of this size in steps of {steps[0]:g}, float16 in {steps[1]:g}."
        if score * math.sqrt(self._dims.get(layer, 0)) >= _LARGEST_HALF:
            text += " Attention that multiplies in float16 before it scales overflows: use a fused one."
        return text

    def _verdict(self, step: int, passed: Passed) -> wire.Verdict:
        wrong = passed.wrong is not None
        layer, head = passed.wrong or (None, None)
        return wire.Verdict(
            id=f"{'' if wrong else 'level-'}{passed.name}-{step}",
            step=step,
            state="raised",
            severity="critical" if wrong else "warning",
            layer=layer,
            head=head,
            cause="attention kernel" if wrong else "score growth",
            signal=KERNEL if wrong else LEVEL,
            evidence=passed.evidence,
            sentence=passed.sentence[:500],
        )
