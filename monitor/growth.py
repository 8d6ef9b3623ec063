"""The past of every head in blocks of steps, and how far a signal has moved over a window of it."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from foreshock.contract import wire

Floats = npt.NDArray[np.float64]

SIGNALS: Final = ("offset", "score", "norm", "ties")
_JITTER_MEMORY: Final = 0.9
"""Weight of the past in the running square of the difference between neighbouring blocks."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How every signal of every head moved over a window, [len(SIGNALS), N] each; NaN where it was not recorded."""

    start: Floats
    middle: Floats
    end: Floats
    jitter: Floats
    """standard error of each of the three"""
    steps: float
    """between the centres of start and end"""

    @property
    def change(self) -> Floats:
        """Away from the start, positive when the magnitude grew."""
        change: Floats = np.sign(self.end) * (self.end - self.start)
        return change

    @property
    def newer_share(self) -> Floats:
        """Part of the change that lies in the newer half of the window: 0.5 for a line, 0 for a stop."""
        with np.errstate(divide="ignore", invalid="ignore"):
            share: Floats = (self.end - self.middle) / (self.end - self.start)
        return share

    @property
    def sigmas(self) -> Floats:
        """The change in units of its standard error."""
        with np.errstate(divide="ignore", invalid="ignore"):
            sigmas: Floats = self.change / (np.sqrt(2.0) * self.jitter)
        return sigmas


class History:
    """A ring of blocks. A block is closed by the first sample that makes it at least `block_steps` long."""

    def __init__(self, heads: int, blocks: int, block_steps: int) -> None:
        self._block_steps = block_steps
        self._values = np.full((blocks, len(SIGNALS), heads), np.nan)
        self._steps = np.zeros(blocks, dtype=np.int64)
        self._closed = 0
        self._jitter = np.full((len(SIGNALS), heads), np.nan)
        self._open = np.full((len(SIGNALS), heads), np.nan)
        self._weight = np.zeros(heads)
        self._open_steps = 0

    def add(self, step: int, since_step: int, weight: Floats, values: Floats) -> bool:
        """Add one sample, values [len(SIGNALS), N]; true when it closed a block.

        Within a block the offset and the ties are means weighted by `weight` [N], the score is a maximum, the norm
        the last one recorded. A head that recorded nothing leaves the block as it was.
        """
        known = ~np.isnan(values[0])
        share = np.divide(weight, self._weight + weight, out=np.zeros_like(weight), where=known & (weight > 0))
        old, new = self._open[::3], values[::3]  # the offset and the ties
        self._open[::3] = np.where(np.isnan(old), new, np.where(known, old + share * (new - old), old))
        self._weight += np.where(known, weight, 0.0)
        np.fmax(self._open[1], values[1], out=self._open[1])
        np.copyto(self._open[2], values[2], where=~np.isnan(values[2]))
        self._open_steps += step - since_step
        if self._open_steps < self._block_steps:
            return False
        self._close(step)
        return True

    def _close(self, step: int) -> None:
        place = self._closed % len(self._steps)
        if self._closed:
            difference = self._open - self._values[place - 1]
            square = difference * difference / 2.0
            smooth = _JITTER_MEMORY * self._jitter + (1 - _JITTER_MEMORY) * square
            self._jitter = np.where(np.isnan(smooth), np.where(np.isnan(square), self._jitter, square), smooth)
        self._values[place] = self._open
        self._steps[place] = step
        self._closed += 1
        self._open_steps = 0
        self._weight[:] = 0.0
        norm = self._open[2].copy()
        self._open[:] = np.nan
        self._open[2] = norm

    @property
    def last_step(self) -> int:
        """Step at which the last block was closed; 0 before the first."""
        return int(self._steps[(self._closed - 1) % len(self._steps)]) if self._closed else 0

    def growth(self, window_steps: float, shortest_steps: float) -> Growth | None:
        """Over the last `window_steps`; None while less than `shortest_steps` of past is held."""
        held = min(self._closed, len(self._steps))
        order = (self._closed - held + np.arange(held)) % len(self._steps)
        steps = self._steps[order]
        order = order[steps > steps[-1] - window_steps] if held else order
        count = len(order)
        if count < 4 or self._steps[order[-1]] - self._steps[order[0]] < shortest_steps - self._block_steps:
            return None
        part = max(1, count // 6)
        half = (count - part) // 2
        parts = (order[:part], order[half : half + part], order[-part:])
        start, middle, end = (np.add.reduce(self._values[rows]) / part for rows in parts)
        between = float(self._steps[parts[2]].mean() - self._steps[parts[0]].mean())
        return Growth(start, middle, end, np.sqrt(self._jitter / part), between)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able, exact to the bit."""
        arrays = {name: wire.Array.of(getattr(self, name)).model_dump() for name in self._ARRAYS}
        return {**arrays, "closed": self._closed, "open_steps": self._open_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back to a saved state. Raises ValueError when it was saved with other heads or another window."""
        for name in self._ARRAYS:
            saved, own = wire.Array.model_validate(state[name]).numpy(), getattr(self, name)
            if saved.shape != own.shape:
                raise ValueError(
                    f"the saved history {name} has shape {saved.shape}, this run needs {own.shape}; "
                    "resume with the same heads and the same detector configuration"
                )
            setattr(self, name, saved)
        self._closed, self._open_steps = int(state["closed"]), int(state["open_steps"])

    _ARRAYS = ("_values", "_steps", "_jitter", "_open", "_weight")


def lower_median(values: Floats) -> Floats:
    """Along the last axis, NaN left out; NaN where nothing is known."""
    ordered = np.sort(values, axis=-1)  # NaN last
    middle = np.maximum(np.count_nonzero(~np.isnan(values), axis=-1) - 1, 0) // 2
    median: Floats = np.take_along_axis(ordered, middle[..., None], axis=-1)[..., 0]
    return median


def median_of_others(values: Floats) -> Floats:
    """For every place of the last axis, the lower median of the other places; NaN where there is none."""
    order = np.argsort(values, axis=-1)
    rank = np.argsort(order, axis=-1)
    others = np.count_nonzero(~np.isnan(values), axis=-1)[..., None] - ~np.isnan(values)
    middle = np.maximum(others - 1, 0) // 2
    middle += rank <= middle  # the own place is skipped
    ordered = np.take_along_axis(values, order, axis=-1)
    median = np.take_along_axis(ordered, np.minimum(middle, values.shape[-1] - 1), axis=-1)
    return np.where(others > 0, median, np.nan)
