"""What is remembered of a run: all that the next verdicts depend on, under names; saved with the checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from foreshock.contract import wire
from foreshock.contract.message import first_error
from foreshock.contract.modes import ROUNDING_ENDS
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.growth import HeadPasts, HeadSignal, SavedFloats, SavedInts
from foreshock.monitor.detect.non_finite import NonFiniteTracker
from foreshock.monitor.detect.readings import Readings, is_finite
from foreshock.monitor.detect.thresholds import DetectorConfig

LAYOUT: Final = 5
"""Of what is saved: one more with every field that comes, goes or changes. A state of another one is refused."""
_ENDS: Final = int(ROUNDING_ENDS)
"""A flag beside a number of NumPy's takes some forty times as long."""


@dataclass(slots=True)
class Alarm:
    """A latched verdict, and the last step at which its head tripped: it is cleared some time after that."""

    verdict: wire.Verdict
    tripped_step: int


@dataclass(slots=True, kw_only=True)
class RunState:
    """The run so far. Arrays are over its N heads."""

    layout: int = LAYOUT
    heads: list[wire.HeadRef]
    past: HeadPasts
    warning_ratios: SavedFloats
    """of the last `persist_blocks` blocks, a ring, [blocks, 2, N]"""
    bias_sum: SavedFloats
    """delta bias over the closed blocks"""
    bias_squares: SavedFloats
    """sum of the squares of each block's"""
    bias_open: SavedFloats
    """over the open block"""
    modes: SavedInts
    """of the last sample; -1 before the first"""
    rounds: bool = True
    """whether attention was computed in a type that rounds"""
    non_finite: NonFiniteTracker = field(default_factory=NonFiniteTracker)
    alarms: dict[int, Alarm] = field(default_factory=dict)
    """by head, or RUN: the verdicts that are raised and not cleared"""
    last_step: int = -1
    peak_rate: float = 0.0
    """highest learning rate"""
    peak_rate_step: int = 0
    """at which it came"""

    @classmethod
    def begin(cls, heads: Sequence[wire.HeadRef], config: DetectorConfig) -> Self:
        """Of a run that nothing is known of yet."""
        count = len(heads)
        return cls(
            heads=list(heads),
            past=HeadPasts.begin(count, config.window_steps, config.block_steps),
            warning_ratios=np.zeros((config.persist_blocks, len(HeadSignal), count)),
            bias_sum=np.zeros(count),
            bias_squares=np.zeros(count),
            bias_open=np.zeros(count),
            modes=np.full(count, -1, dtype=np.int32),
        )

    def set_back(self, config: DetectorConfig) -> Self:
        """Of a run that was set back to an older checkpoint: its past is forgotten, its verdicts stand."""
        kept = ("modes", "rounds", "alarms", "last_step", "peak_rate", "peak_rate_step")
        return replace(self.begin(self.heads, config), **{name: getattr(self, name) for name in kept})

    @property
    def delta_bias_z(self) -> Floats:
        """The accumulated delta bias in units of its standard error; 0 where it is not applied, NaN before a block of
        it was closed."""
        if not self.rounds:
            return np.zeros_like(self.bias_sum)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.modes & _ENDS, 0.0, self.bias_sum / np.sqrt(self.bias_squares))

    def can_round(self, head: int) -> bool:
        """Whether the head's delta bias is applied."""
        return self.rounds and not self.modes[head] & _ENDS

    def past_warmup(self, earliest_steps: int) -> bool:
        """Growth is judged after these, and once the learning rate rises no more."""
        return self.last_step >= earliest_steps and self.last_step > self.peak_rate_step

    def add(self, readings: Readings) -> bool:
        """Add a sample to the open block; whether that closes it."""
        if self.peak_rate_step > readings.step:  # a run that was set back has its peak yet to come
            self.peak_rate, self.peak_rate_step = 0.0, 0
        if readings.learning_rate is not None and readings.learning_rate > self.peak_rate:
            self.peak_rate, self.peak_rate_step = readings.learning_rate, readings.step
        self.last_step = readings.step
        self.rounds, draw, changed = readings.rounds, readings.delta_bias_sum, self.modes != readings.modes
        if np.count_nonzero(changed):
            self.bias_sum[changed] = self.bias_squares[changed] = self.bias_open[changed] = 0.0
            self.modes = readings.modes.astype(np.int32)
        self.bias_open += draw if is_finite(draw) else np.where(np.isfinite(draw), draw, 0.0)
        counted = readings.rows, readings.score_offset, readings.largest_score
        closed = self.past.add(readings.step, readings.since_step, *counted, readings.learning_rate)
        if closed:  # A block is one draw: rows of one step are not independent, and more samples are no more evidence.
            self.bias_sum += self.bias_open
            self.bias_squares += self.bias_open * self.bias_open
            self.bias_open[:] = 0.0
        return closed

    def saved(self) -> dict[str, Any]:
        """JSON-able, exact to the bit."""
        return dict(_SAVED.dump_python(self, mode="json"))

    def loaded(self, saved: dict[str, Any]) -> "RunState":
        """A saved state, for the run that this one is of. Raises ValueError with a sentence where it does not fit."""
        if (layout := saved.get("layout", 1)) != LAYOUT:
            raise ValueError(f"the saved detectors have layout {layout!r}, this version reads layout {LAYOUT}")
        try:
            found = _SAVED.validate_python(saved)
        except ValidationError as error:
            raise ValueError(f"the saved detectors are damaged: {first_error(error)}") from None
        if found.heads != self.heads:
            raise ValueError(
                f"the saved detectors watched {len(found.heads)} heads, this run has {len(self.heads)} or others; "
                "resume with the same model"
            )
        if _measures(found) != _measures(self):
            raise ValueError(
                "the saved detectors have other blocks or another window; resume with the same detector configuration"
            )
        return found


def _measures(state: RunState) -> list[object]:
    """Type and shape of every array, and the length of blocks."""
    values = [getattr(part, each.name) for part in (state, state.past) for each in fields(part)]
    arrays = [(value.dtype.str, value.shape) for value in values if isinstance(value, np.ndarray)]
    return [*arrays, state.past.block_steps]


_SAVED: Final = TypeAdapter(RunState)
