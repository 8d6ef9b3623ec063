"""What is remembered of a run: all that the next verdicts depend on, under names; saved with the checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from foreshock.contract import wire
from foreshock.contract.modes import ROUNDING_ENDS
from foreshock.contract.wire import first_error
from foreshock.monitor.detect.bias_evidence import BiasEvidence
from foreshock.monitor.detect.growth import HeadPasts, HeadSignal, SavedFloats, SavedInts
from foreshock.monitor.detect.non_finite import NonFiniteTracker
from foreshock.monitor.detect.readings import Readings
from foreshock.monitor.detect.rule import DetectorConfig, Flags

LAYOUT: Final = 15
"""Of what is saved: one more with every field that comes, goes or changes. A state of another one is refused."""
_ENDS: Final = int(ROUNDING_ENDS) | 16
"""16 is the flag of a mode that only recorded runs have. A plain int: comparing an IntFlag with NumPy integers is 40
times slower."""


@dataclass(slots=True)
class Alarm:
    """A latched verdict, and the last step at which its head tripped or its level was passed: it is cleared some time
    after that."""

    verdict: wire.Verdict
    tripped_step: int


@dataclass(slots=True, kw_only=True)
class RunState:
    """The run so far. Arrays are over its N heads."""

    layout: int = LAYOUT
    heads: list[wire.HeadRef]
    past: HeadPasts
    bias: BiasEvidence
    warning_ratios: SavedFloats
    """of the last `persist_blocks` blocks, the oldest first, [blocks, 2, N]"""
    modes: SavedInts
    """of the last sample; -1 before the first"""
    rounds: bool = True
    """whether attention was computed in a type that rounds"""
    non_finite: NonFiniteTracker = field(default_factory=NonFiniteTracker)
    alarms: dict[int, Alarm] = field(default_factory=dict)
    """by head, or RUN: the verdicts that are raised and not cleared"""
    levels: dict[str, Alarm] = field(default_factory=dict)
    """the same by level or layer with wrong rows"""
    first_score: float | None = None
    """the largest |score| of the first sample with rows"""
    first_step: int = 0
    """of that sample"""
    last_step: int = -1

    @classmethod
    def begin(cls, heads: Sequence[wire.HeadRef], config: DetectorConfig) -> Self:
        """Of a run that nothing is known of yet."""
        count = len(heads)
        return cls(
            heads=list(heads),
            past=HeadPasts.begin(count, config.window_steps, config.block_steps),
            bias=BiasEvidence.begin(count),
            warning_ratios=np.zeros((config.persist_blocks, len(HeadSignal), count)),
            modes=np.full(count, -1, dtype=np.int32),
        )

    def set_back(self, step: int) -> None:
        """Forget what came after `step`, since the run was set back to a checkpoint of it; its verdicts stand."""
        self.past.set_back(self.last_step - step)
        self.last_step = step
        self.warning_ratios[:] = 0.0
        self.bias.drop_open()
        self.non_finite = NonFiniteTracker()

    def can_round(self) -> Flags:
        """The heads whose delta bias is applied."""
        plain: Flags = self.modes & _ENDS == 0
        return plain if self.rounds else np.zeros_like(plain)

    def add(self, readings: Readings) -> int:
        """Add a sample to the open block; the steps of that block if the sample closes it, else 0."""
        steps = readings.step - max(readings.since_step, min(self.last_step, readings.step - 1))
        self.last_step, self.rounds = readings.step, readings.rounds
        if self.modes.tobytes() != readings.modes.tobytes():
            self.bias.forget(self.modes != readings.modes)
            self.modes = readings.modes.astype(np.int32)
        self.bias.add(readings.delta_bias_sum, readings.rows, finite=readings.largest is not None)
        closed = self.past.add(steps, readings)
        if closed:
            self.bias.close()
        return closed

    def loaded(self, saved: dict[str, Any]) -> "RunState":
        """A saved state, for the run that this one is of. Raises ValueError with a sentence where it does not fit."""
        if (layout := saved.get("layout", 1)) != LAYOUT:
            raise ValueError(f"the saved detectors have layout {layout!r}, this version reads layout {LAYOUT}")
        try:
            found = SAVED.validate_python(saved)
        except ValidationError as error:
            raise ValueError(f"the saved detectors are damaged: {first_error(error)}") from None
        if _measures(found) != _measures(self):
            raise ValueError(
                "the saved detectors have other heads, other blocks or another window; resume with the same model and "
                "detector configuration"
            )
        return found


def _measures(state: RunState) -> list[object]:
    """The heads, type and shape of every array, and length and number of blocks."""
    past = state.past
    values = [getattr(part, each.name) for part in (state, past, state.bias) for each in fields(part)]
    arrays = [(value.dtype.str, value.shape) for value in values if isinstance(value, np.ndarray)]
    blocks = {(each.values.dtype.str, each.values.shape) for each in past.blocks} - {
        (past.open.dtype.str, past.open.shape)
    }
    return [state.heads, *arrays, *blocks, past.block_steps, past.most]


SAVED: Final = TypeAdapter(RunState)
"""Reads and writes a state as JSON, exact to the bit."""
