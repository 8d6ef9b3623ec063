"""Numbers that are not finite: since when, where they were born, and what is harmed. What to do is the incident's."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats, Slot, slot_values
from foreshock.contract.wire import HeadRef
from foreshock.monitor.detect.readings import Readings

RUN: Final = -1
"""Index that stands for the whole run."""
NON_FINITE: Final = "nonfinite"
"""The signal of what is not finite."""
Harm = Literal["", "rows", "updates", "weights"]
"""What is harmed: nothing; rows that reach neither loss nor gradients; updates that are skipped; the weights."""
_LOST_SHARE: Final = 0.1
"""Share of lost updates from which on they are reported. A GradScaler that has found its scale loses 1 in 2,000."""
_FROM_THE_START: Final = (
    "The first step of this process was broken already: check the weights that were loaded, the mask, "
    "and the type that scores are computed in."
)
_UNKNOWN: Final = "but that step's rows were not measured (sample_every_steps=1 measures every step)"
_UNMEASURED: Final = "but no row of attention was measured (agent.report() says why)"

FIRST_UPDATE: Final = "first in the update of this step, or in the weights that were loaded: its loss is finite"

_BEHIND: Final = "in the loss, the output head or the last block"
_LONGEST: Final = 500
"""Characters of a sentence on the wire; of names that are longer whole sentences are left out."""
_NAMED: Final = 3
"""Heads that a place names one by one."""


@dataclass(slots=True)
class Overflow:
    """Samples in a row, or nearly so, whose updates are skipped: their gradients overflow, the weights stay finite."""

    step: int
    """of the first one"""
    suspect_step: int
    """the step suspected with it"""
    last_step: int
    lost: int = 0
    """updates"""
    loss: bool = False
    """whether a loss was not finite either, though the weights are"""
    search: int = 0
    """updates lost before any was not, as a GradScaler loses them that searches for its scale"""
    searches: bool = True

    def lasts(self, overflow_steps: int) -> bool:
        """Whether this is no GradScaler that searches for its scale."""
        steps = self.last_step - self.step
        searched = 0 if self.search >= overflow_steps else self.search
        return steps >= overflow_steps and self.lost - searched >= _LOST_SHARE * steps


@dataclass(slots=True)
class Origin:
    """What the first broken sample shows. Later ones hold what follows from broken weights."""

    step: int
    """the first step that is known to be broken"""
    place: str
    """the end of a sentence; empty if nothing is known of rows"""
    heads: int
    """heads with rows that are not finite, the most of any sample"""
    empty: str
    """a sentence about rows that see no key"""
    parameters: str
    """a sentence about gradients and weights"""
    by_rows: bool = False
    """whether rows that were measured show the place, which is as exact as it gets"""

    @classmethod
    def of(cls, readings: Readings, heads: Sequence[HeadRef], *, measured: bool) -> Self:
        """Of the first broken sample. measured: whether any sample held rows."""
        first = readings.step if readings.broken_step is None else readings.broken_step
        place, shown, empty = readings.softmax or readings.place, "", ""
        if heads and (words := readings.words) is not None:
            broken = Slot.NONFINITE_ROWS, Slot.NONFINITE_INPUT_ROWS, Slot.NONFINITE_OUTPUT_ROWS
            slots = *broken, Slot.EMPTY_ROWS, Slot.ROWS
            rows, by_input, by_output, unseen, sound = (slot_values(words, slot) for slot in slots)
            # After a step that broke the weights, the inputs of the first layer are broken too, and show nothing.
            first_layer = [layer == heads[0][0] for layer, _ in heads]
            if first >= readings.step or not by_input[first_layer].any():
                shown = place_of(heads, rows, by_input, by_output)
            place = readings.softmax or shown or place or (_UNKNOWN if measured else _UNMEASURED)
            worst = int(unseen.argmax())
            if unseen[worst]:
                every = unseen[worst] + rows[worst] + sound[worst]
                empty = f"{unseen[worst]:.0f} of {every:.0f} rows of a head see no key: suspect the mask first."
        return cls(first, place, 0, empty, readings.parameters, bool(shown))


@dataclass(slots=True)
class NonFiniteTracker:
    """What is not finite; None and empty while nothing is.

    The step suspected is the one whose update may have broken the weights. Where the single steps are not known, it is
    the last one of the sample before, which left the weights of this one.
    """

    overflow: Overflow | None = None
    origin: Origin | None = None
    suspect_step: int | None = None
    """the step suspected with the first of the samples in a row that are broken"""
    harm: Harm = ""
    placed: bool = False
    """whether this sample showed the place of what was reported without one"""
    measured: bool = False
    """whether any sample held rows of attention"""
    seen_finite: bool = False
    """whether any sample was finite: else what was loaded is broken, or how the model computes"""

    def update(self, readings: Readings, overflow_steps: int, heads: Sequence[HeadRef]) -> list[int]:
        """The run and its heads that are broken, first the run; overflow alone breaks them after `overflow_steps`."""
        loss, norm, in_rows = readings.loss, readings.grad_norm, readings.nonfinite_rows > 0
        if not readings.finite:
            in_rows |= np.isinf(readings.score_offset) | (readings.largest_score == np.inf)
        loss_broken, norm_broken = (value is not None and not math.isfinite(value) for value in (loss, norm))
        any_row = bool(in_rows.any())
        # A GradScaler finds its scale by steps whose gradients overflow, and skips them. After a step that was not
        # skipped the loss would not be finite either.
        skipped = loss is not None and not loss_broken and (norm_broken or (norm is None and any_row))
        overflows = (skipped or (loss_broken and bool(readings.parameters))) and not readings.weights_broken
        suspected = max(readings.since_step, 1)
        if self.seen_finite and readings.suspect_step is not None:
            suspected = readings.suspect_step
        self._track_overflow(readings, suspected, overflow_steps, overflows=overflows)
        if readings.weights_broken or ((loss_broken or norm_broken) and not overflows):
            self.harm = "weights"
        elif overflows:
            lasts = self.overflow is not None and (self.overflow.loss or self.overflow.lasts(overflow_steps))
            self.harm = "updates" if lasts else ""
        else:
            self.harm = ("weights" if loss is None or norm is None else "rows") if any_row else ""
        self.placed = False
        self.measured = self.measured or any_row or bool(readings.rows.any())
        if self.harm or overflows:
            seen = Origin.of(readings, heads, measured=self.measured)
            self.origin = self.origin or seen
            if overflows and not self.origin.by_rows:  # the weights are sound: any such step shows the place
                self.placed = seen.by_rows or (self.origin.place == _UNKNOWN != seen.place)
            if self.placed:
                self.origin.place, self.origin.by_rows = seen.place, seen.by_rows
            self.origin.heads = max(self.origin.heads, int(in_rows.sum()))
            self.origin.parameters = self.origin.parameters or readings.parameters
        elif self.overflow is None:
            self.origin = None
        self.seen_finite |= not (loss_broken or norm_broken or any_row or readings.weights_broken)
        if not self.harm:
            self.suspect_step = None
            return []
        if self.suspect_step is None:
            self.suspect_step = suspected if self.overflow is None else self.overflow.suspect_step
        return [RUN, *np.flatnonzero(in_rows).tolist()]

    def _track_overflow(self, readings: Readings, suspected: int, overflow_steps: int, *, overflows: bool) -> None:
        step, known = readings.step, self.overflow
        if overflows:
            self.overflow = known or Overflow(step, suspected, step)
            self.overflow.last_step = step
            lost = max(readings.lost_steps, 1)
            self.overflow.searches &= known is None or lost == step - readings.since_step
            self.overflow.search += lost * self.overflow.searches
            self.overflow.lost += lost
            self.overflow.loss |= readings.loss is not None and not math.isfinite(readings.loss)
        elif known is not None:
            known.searches = False
            if step - known.last_step > overflow_steps:
                self.overflow = None

    def sentence(self, step: int, heads: int) -> str:
        """What is known at `step`, in words. heads: how many the model has."""
        found = self.origin or Origin(step, "", 0, "", "")
        place = f", {found.place}" if found.place else ""
        extent = f"{found.heads} of {heads} heads have such rows." if found.heads else ""
        if self.harm == "rows":
            what = f"Attention rows are not finite since step {found.step}{place}."
            then = "They reach neither the loss nor the gradient norm, which are finite."
        elif self.harm == "updates" and self.overflow is not None:
            of = max(step - self.overflow.step + 1, self.overflow.lost)
            if self.overflow.loss:
                what, then = f"The loss was not finite in {self.overflow.lost} of {of} steps{place}.", ""
            else:
                what = f"{self.overflow.lost} of {of} updates were lost: their gradients are not finite{place}."
                then = "Loss and weights stay finite, because the trainer skips these updates."
        else:
            what = f"Numbers are not finite since step {found.step}{place}."
            finite_loss = found.place == FIRST_UPDATE or found.place.startswith("first in the backward")
            then = "" if self.seen_finite or finite_loss else _FROM_THE_START
        said: list[str] = []
        for each in re.split(r"(?<=\.) ", " ".join(filter(None, (what, extent, found.parameters, found.empty, then)))):
            if len(" ".join((*said, each))) <= _LONGEST:
                said.append(each)
        return " ".join(said)


def place_of(heads: Sequence[HeadRef], broken: Floats, by_input: Floats, by_output: Floats) -> str:
    """Where a number that is not finite was born, as the end of a sentence; empty if every row is finite.

    Layers are numbered as the forward runs through them. A forward that breaks reaches the attention of every later
    layer; then the loss is not finite, and no gradient is. A backward that breaks reaches the attention of every
    earlier layer only. So the first layer whose input or output is broken shows the place, and without one the last
    layer whose gradient is.

    heads: (layer, head) of each row. broken: how many rows of each head are not finite, [N]. by_input, by_output: how
    many of these have an input, or a finite input and an output, that is not finite.
    """
    layers = np.array([layer for layer, _ in heads])
    if (forward := by_input + by_output > 0).any():
        first = int(layers[forward].min())
        own = layers == first
        if not (by_input[own] > 0).any():
            named = _named(heads, own & forward)
            return f"first in the forward, in the attention output of {named}; its inputs are finite"
        into = f"the inputs of {f'layer {first}' if forward[own].all() else _named(heads, own & forward)}"
        if (before := layers[layers < first]).size:
            return f"first in the forward, between the attention of layer {before.max()} and {into}, or in its mask"
        return f"in the forward, at or before {into}: the weights, the mask, or the batch"
    if not (broken > 0).any():
        return ""
    last = int(layers[broken > 0].max())
    if (after := layers[layers > last]).size:
        return f"first in the backward, between layer {last} and layer {after.min()}"
    return f"first in the backward, after the attention of layer {last}: {_BEHIND}"


def place_by_outputs(outputs: Sequence[tuple[int, bool]], *, loss: float, every_gradient: bool) -> str:
    """The place as the end of a sentence, by the outputs of a step; empty if none was seen.

    outputs: the layers whose output was seen, and whether it broke. loss: that of the step. every_gradient: whether no
    gradient of the step is finite.
    """
    if not outputs:
        return ""
    first = min((layer for layer, broken in outputs if broken), default=None)
    before = max((layer for layer, _ in outputs if first is None or layer < first), default=None)
    if first is None:
        way = "forward" if not math.isfinite(loss) else "backward"
        if way == "backward" and not every_gradient:
            return "first in the backward"
        spread = ", unless clipping spread it" if way == "backward" else ""
        return f"first in the {way}, after the attention of layer {before}: {_BEHIND}{spread}"
    if before is None:
        known = f"at or before the attention of layer {first}"
        return f"first in the forward, {known}: in the batch, in the weights or in this attention"
    return f"first in the forward, between the attention of layer {before} and that of layer {first}"


def _named(heads: Sequence[HeadRef], own: npt.NDArray[np.bool_]) -> str:
    rows = np.flatnonzero(own).tolist()
    names = ", ".join(f"layer {heads[row][0]} head {heads[row][1]}" for row in rows[:_NAMED])
    return names + (f" and {len(rows) - _NAMED} more heads of it" if len(rows) > _NAMED else "")
