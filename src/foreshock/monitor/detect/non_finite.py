"""Nonfinite numbers: when and where they first appeared, and what they damage. The incident says what to do."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self

import numpy as np

from foreshock.contract.slots import Floats, Slot, slot_values
from foreshock.contract.wire import HeadRef
from foreshock.monitor.detect.readings import Readings

RUN: Final = -1
"""Index of the run as a whole, among indices of heads."""
NON_FINITE: Final = "nonfinite"
"""The signal of a verdict on nonfinite numbers."""
Harm = Literal["", "rows", "updates", "weights"]
"""The damage: none; rows that do not reach loss or gradients; updates that are skipped; the weights."""
_LOST_SHARE: Final = 0.1
"""Share of lost updates that is reported. A GradScaler that has found its scale loses 1 in 2,000."""
_FROM_THE_START: Final = (
    "The first step of this process was broken already: check the weights that were loaded, the mask, "
    "and the type that scores are computed in."
)
_UNKNOWN: Final = "but that step's rows were not measured (sample_every_steps=1 measures every step)"
_UNMEASURED: Final = "but no row of attention was measured (agent.report() says why)"

FIRST_UPDATE: Final = "first in the update of this step, or in the weights that were loaded: its loss is finite"

_BEHIND: Final = "in the loss, the output head or the last block"
_LONGEST: Final = 500
"""Longest message in a verdict; if it would be longer, whole sentences are omitted."""
_NAMED: Final = 3
"""The number of heads that a place lists."""


@dataclass(slots=True)
class Overflow:
    """A series of samples whose updates are skipped, because gradients overflow while the weights stay finite."""

    step: int
    """the step of the first sample"""
    suspect_step: int
    """the suspected step of the first sample"""
    last_step: int
    lost: int = 0
    """number of lost updates"""
    loss: bool = False
    """whether a loss was nonfinite too, although the weights are finite"""
    search: int = 0
    """updates lost before the first successful one, as by a GradScaler that searches for its scale"""
    searches: bool = True
    """whether every update since the first lost one was lost"""

    def add(self, readings: Readings) -> None:
        """Count a sample with lost updates."""
        self.last_step, lost = readings.step, max(readings.lost_steps, 1)
        self.searches &= self.lost == 0 or lost == readings.step - readings.since_step
        self.search += lost * self.searches
        self.lost += lost
        self.loss |= _broken(readings.loss)

    def lasts(self, overflow_steps: int) -> bool:
        """Whether this is more than a GradScaler that searches for its scale."""
        steps = self.last_step - self.step
        searched = 0 if self.search >= overflow_steps else self.search
        return self.loss or (steps >= overflow_steps and self.lost - searched >= _LOST_SHARE * steps)


@dataclass(slots=True)
class Origin:
    """Findings in the first broken sample. Later samples only show consequences of broken weights."""

    step: int
    """the first step that is known to be broken"""
    place: str
    """the end of a sentence; empty if rows are unknown"""
    empty: str = ""
    """a sentence about rows that do not see any key"""
    parameters: str = ""
    """a sentence about gradients and weights"""
    heads: int = 0
    """the largest number of heads with nonfinite rows in one sample"""
    by_rows: bool = False
    """whether measured rows show the place, which is the most exact evidence"""

    @classmethod
    def of(cls, readings: Readings, heads: Sequence[HeadRef], *, measured: bool) -> Self:
        """Return the findings of the first broken sample. measured: whether any sample contained rows."""
        first = readings.step if readings.broken_step is None else readings.broken_step
        found = cls(first, readings.softmax or readings.place, parameters=readings.parameters)
        if not heads or (words := readings.words) is None:
            return found
        broken = Slot.NONFINITE_ROWS, Slot.NONFINITE_INPUT_ROWS, Slot.NONFINITE_OUTPUT_ROWS
        rows, by_input, by_output = (slot_values(words, slot) for slot in broken)
        # After a step that broke the weights, the first layer's inputs are broken too, and do not show the place.
        first_layer = [layer == heads[0][0] for layer, _ in heads]
        later = first < readings.step and by_input[first_layer].any()
        shown = "" if later else place_of(heads, rows, by_input, by_output)
        found.by_rows = bool(shown)
        found.place = readings.softmax or shown or readings.place or (_UNKNOWN if measured else _UNMEASURED)
        unseen = words[:, Slot.EMPTY_ROWS]
        worst = int(unseen.argmax())
        if unseen[worst]:
            every = words[worst, [Slot.EMPTY_ROWS, Slot.NONFINITE_ROWS, Slot.ROWS]].sum()
            found.empty = f"{unseen[worst]} of {every} rows of a head see no key: suspect the mask first."
        return found


@dataclass(slots=True)
class NonFiniteTracker:
    """Tracks nonfinite numbers over the samples; attributes are None or empty while all numbers are finite.

    The suspected step is the one whose update may have broken the weights. If single steps are not known, it is the
    last step of the sample before, whose update produced the weights of this sample.
    """

    overflow: Overflow | None = None
    origin: Origin | None = None
    suspect_step: int | None = None
    """the suspected step of the first sample in the current series of broken samples"""
    harm: Harm = ""
    placed: bool = False
    """whether this sample showed the place of an origin that was reported without one"""
    measured: bool = False
    """whether any sample contained rows of attention"""
    seen_finite: bool = False
    """whether any sample was finite; if not, the loaded weights or the model's computation are broken"""

    def update(self, readings: Readings, overflow_steps: int, heads: Sequence[HeadRef]) -> list[int]:
        """Add a sample; return the indices of the run, first, and of its heads that are broken, or an empty list.

        If gradients only overflow, this counts as broken after `overflow_steps`.
        """
        loss, norm, in_rows = readings.loss, readings.grad_norm, readings.nonfinite_rows.nonzero()[0]
        if readings.largest is None:
            infinite = np.isinf(readings.score_offset) | (readings.largest_score == np.inf)
            in_rows = np.flatnonzero((readings.nonfinite_rows > 0) | infinite)
        any_row = len(in_rows) > 0
        # A GradScaler finds its scale by steps whose gradients overflow, and skips them. If such a step were not
        # skipped, the next loss would be nonfinite too.
        skipped = loss is not None and not _broken(loss) and (_broken(norm) or (norm is None and any_row))
        overflows = (skipped or (_broken(loss) and bool(readings.parameters))) and not readings.weights_broken
        suspected = max(readings.since_step, 1)
        if self.seen_finite and readings.suspect_step is not None:
            suspected = readings.suspect_step
        if overflows:
            self.overflow = self.overflow or Overflow(readings.step, suspected, readings.step)
            self.overflow.add(readings)
            self.harm = "updates" if self.overflow.lasts(overflow_steps) else ""
        else:
            if self.overflow is not None:
                self.overflow.searches = False
                if readings.step - self.overflow.last_step > overflow_steps:
                    self.overflow = None
            unknown = any_row and (loss is None or norm is None)
            weights = readings.weights_broken or _broken(loss) or _broken(norm) or unknown
            self.harm = "weights" if weights else "rows" if any_row else ""
        self.measured = self.measured or any_row or bool(readings.rows.any())
        self.placed = False
        if self.harm or overflows:
            self._trace(Origin.of(readings, heads, measured=self.measured), len(in_rows), overflows=overflows)
        else:
            self.seen_finite = True
            if self.overflow is None:
                self.origin = None
        if not self.harm:
            self.suspect_step = None
            return []
        if self.suspect_step is None:
            self.suspect_step = suspected if self.overflow is None else self.overflow.suspect_step
        return [RUN, *in_rows.tolist()]

    def _trace(self, seen: Origin, heads: int, *, overflows: bool) -> None:
        """Add findings of a broken sample to the origin if they were unknown."""
        found = self.origin = self.origin or seen
        if overflows and not found.by_rows:  # the weights are finite, so any such step shows the place
            self.placed = seen.by_rows or (found.place == _UNKNOWN != seen.place)
        if self.placed:
            found.place, found.by_rows = seen.place, seen.by_rows
        found.heads = max(found.heads, heads)
        found.parameters = found.parameters or seen.parameters

    def sentence(self, step: int, heads: int) -> str:
        """Describe in words what is known at `step`. heads: the number of heads of the model."""
        found = self.origin or Origin(step, "")
        place = f", {found.place}" if found.place else ""
        extent = f"{found.heads} of {heads} heads have such rows." if found.heads else ""
        what, then = f"Numbers are not finite since step {found.step}{place}.", ""
        if self.harm == "rows":
            what = f"Attention rows are not finite since step {found.step}{place}."
            then = "They reach neither the loss nor the gradient norm, which are finite."
        elif self.harm == "updates" and self.overflow is not None:
            lost = f"{self.overflow.lost} of {max(step - self.overflow.step + 1, self.overflow.lost)}"
            what = f"The loss was not finite in {lost} steps{place}."
            if not self.overflow.loss:
                what = f"{lost} updates were lost: their gradients are not finite{place}."
                then = "Loss and weights stay finite, because the trainer skips these updates."
        elif not (self.seen_finite or found.place == FIRST_UPDATE or found.place.startswith("first in the backward")):
            then = _FROM_THE_START
        said = ""
        for each in re.split(r"(?<=\.) ", " ".join(filter(None, (what, extent, found.parameters, found.empty, then)))):
            longer = f"{said} {each}".strip()
            said = longer if len(longer) <= _LONGEST else said
        return said


def _broken(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def place_of(heads: Sequence[HeadRef], broken: Floats, by_input: Floats, by_output: Floats) -> str:
    """Return where nonfinite numbers first appeared, as the end of a sentence; empty if every row is finite.

    Layers are numbered in the order of the forward. Nonfinite numbers from the forward reach the attention of every
    later layer, the loss and all gradients. Nonfinite numbers from the backward only reach the attention of earlier
    layers. Therefore the first layer with a nonfinite input or output shows the place; if there is none, the last layer
    with a nonfinite gradient does.

    heads: (layer, head) of each row. broken: number of nonfinite rows of each head, [N]. by_input: number of these with
    a nonfinite input. by_output: number of these with a finite input and a nonfinite output.
    """
    layers = np.array([layer for layer, _ in heads])
    if (forward := by_input + by_output > 0).any():
        first = layers[forward].min()
        own = layers == first
        names = [f"layer {heads[row][0]} head {heads[row][1]}" for row in np.flatnonzero(own & forward)]
        more = f" and {len(names) - _NAMED} more heads of it" if len(names) > _NAMED else ""
        named = ", ".join(names[:_NAMED]) + more
        if not by_input[own].any():
            return f"first in the forward, in the attention output of {named}; its inputs are finite"
        into = f"the inputs of {f'layer {first}' if forward[own].all() else named}"
        if (before := layers[layers < first]).size:
            return f"first in the forward, between the attention of layer {before.max()} and {into}, or in its mask"
        return f"in the forward, at or before {into}: the weights, the mask, or the batch"
    if not broken.any():
        return ""
    last = layers[broken > 0].max()
    if (after := layers[layers > last]).size:
        return f"first in the backward, between layer {last} and layer {after.min()}"
    return f"first in the backward, after the attention of layer {last}: {_BEHIND}"


def place_by_outputs(outputs: Sequence[tuple[int, bool]], *, loss: float, every_gradient: bool) -> str:
    """Return the place as the end of a sentence, derived from the outputs of a step; empty if there are none.

    outputs: layers with a known output, and whether the output broke. loss: loss of the step. every_gradient: whether
    all gradients of the step are nonfinite.
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
