"""The state of the detectors for a run, on which later verdicts depend. It is saved with the checkpoint."""

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
"""Version of the saved state, incremented when a field is added, removed or changed. States of other versions are
rejected."""
_ENDS: Final = int(ROUNDING_ENDS) | 16
"""16 is the flag of a mode that only recorded runs have. A plain int: comparing an IntFlag with NumPy integers is 40
times slower."""


@dataclass(slots=True)
class Alarm:
    """An active verdict, and the last step at which its head tripped or its level was exceeded. It is cleared
    `quiet_steps` after that step."""

    verdict: wire.Verdict
    tripped_step: int


@dataclass(slots=True, kw_only=True)
class RunState:
    """The state of a run. Arrays are over its N heads."""

    layout: int = LAYOUT
    heads: list[wire.HeadRef]
    past: HeadPasts
    bias: BiasEvidence
    warning_ratios: SavedFloats
    """ratios of the last `persist_blocks` blocks, oldest first, [blocks, 2, N]"""
    modes: SavedInts
    """modes in the last sample; -1 before the first"""
    rounds: bool = True
    """whether attention was computed in a dtype that rounds"""
    non_finite: NonFiniteTracker = field(default_factory=NonFiniteTracker)
    alarms: dict[int, Alarm] = field(default_factory=dict)
    """active verdicts by index of a head, or RUN"""
    levels: dict[str, Alarm] = field(default_factory=dict)
    """active verdicts by name of a level or of a layer with wrong rows"""
    first_score: float | None = None
    """the largest |score| of the first sample with rows"""
    first_step: int = 0
    """the step of that sample"""
    last_step: int = -1

    @classmethod
    def begin(cls, heads: Sequence[wire.HeadRef], config: DetectorConfig) -> Self:
        """Return the state before the first sample."""
        count = len(heads)
        return cls(
            heads=list(heads),
            past=HeadPasts.begin(count, config.window_steps, config.block_steps),
            bias=BiasEvidence.begin(count),
            warning_ratios=np.zeros((config.persist_blocks, len(HeadSignal), count)),
            modes=np.full(count, -1, dtype=np.int32),
        )

    def set_back(self, step: int) -> None:
        """Drop the state after `step`, because the run was set back to a checkpoint of that step. Verdicts remain."""
        self.past.set_back(self.last_step - step)
        self.last_step = step
        self.warning_ratios[:] = 0.0
        self.bias.drop_open()
        self.non_finite = NonFiniteTracker()

    def can_round(self) -> Flags:
        """Return which heads have their delta bias applied, [N]."""
        plain: Flags = self.modes & _ENDS == 0
        return plain if self.rounds else np.zeros_like(plain)

    def add(self, readings: Readings) -> int:
        """Add a sample to the open block; return the steps of the block if the sample closes it, else 0."""
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
        """Return a saved state of this run. Raises ValueError with a message if the state does not fit the run."""
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
    """Return the heads, dtype and shape of every array, and length and number of blocks."""
    past = state.past
    values = [getattr(part, each.name) for part in (state, past, state.bias) for each in fields(part)]
    arrays = [(value.dtype.str, value.shape) for value in values if isinstance(value, np.ndarray)]
    blocks = {(each.values.dtype.str, each.values.shape) for each in past.blocks} - {
        (past.open.dtype.str, past.open.shape)
    }
    return [state.heads, *arrays, *blocks, past.block_steps, past.most]


SAVED: Final = TypeAdapter(RunState)
"""Converts a state to JSON and back, bit by bit."""
