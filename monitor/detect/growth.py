"""The past of every head in blocks of steps, and how far a signal has moved over a window of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.readings import is_finite
from foreshock.monitor.detect.signals import SIGNAL_NAMES, SIGNALS, Part, by_name

_MEANS: Final = [row for row, info in SIGNALS.items() if info.reduction == "mean"]
_LARGEST: Final = [row for row, info in SIGNALS.items() if info.reduction == "largest"]
_OF_SCORES: Final = np.array([int(row) for row, info in SIGNALS.items() if info.of_scores])
_JITTER_MEMORY: Final = 0.9
"""Weight of the past in the running square of the difference between neighbouring blocks."""
BLOCKS_OF_A_LIFE: Final = 40
"""A young run is seen in finer blocks: one is as long as this part of the run's life, up to `block_steps`."""
_ENDED: Final = 1e-9
"""A learning rate that fell to this part, or to nothing, moves nothing any more."""
_LONGEST_PART: Final = 4
"""Blocks that start, middle and end are means of; fewer in a short window."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How every signal of every head moved over a window, [len(SIGNALS), N]; NaN where it was not recorded.

    What few heads are asked for is worked out for those: `of` names signals and their heads, as (signal, heads).
    """

    _oldest: list[Floats]
    """the blocks at the start"""
    end: Floats
    steps: float
    """between the centres of start and end"""
    _halfway: list[Floats]
    """the blocks in the middle"""
    _jitter: Floats
    """square of the standard error of a block"""
    _blocks: int
    """behind each of start, middle and end"""
    step: int = 0
    """at which the window ends"""
    rate_fall: float = 0.0
    """the learning rate falls by this power of the step; 0 where it does not fall, or is not known"""

    def start(self, of: tuple[Any, Any]) -> Floats:
        """The mean at the start."""
        return _mean([block[of] for block in self._oldest])

    def middle(self, of: tuple[Any, Any]) -> Floats:
        """The mean halfway between start and end."""
        return _mean([block[of] for block in self._halfway])

    def jitter(self, of: tuple[Any, Any]) -> Floats:
        """Standard error of each of start, middle and end."""
        error: Floats = np.sqrt(self._jitter[of] / self._blocks)
        return error

    def evidence(self, heads: Sequence[int]) -> dict[str, Floats]:
        """What verdicts show of these heads, by name, [len(heads)]."""
        parts = [(name, part, signal) for signal, info in SIGNALS.items() for name, part in info.evidence.items()]
        named = {name: self._part(part, (signal, heads)) for name, part, signal in parts}
        return named | {"window_steps": np.full(len(heads), self.steps)}

    def _part(self, part: Part, of: tuple[Any, Any]) -> Floats:
        found: Floats = self.jitter(of) if part == "jitter" else self.end[of] if part == "end" else self.start(of)
        return found

    def change(self, of: tuple[Any, Any]) -> Floats:
        """Away from the start, positive when the magnitude grew."""
        return away(self.start(of), self.end[of])

    def sigmas(self, of: tuple[Any, Any]) -> Floats:
        """The change in units of its standard error."""
        sigmas: Floats = self.change(of) / (np.sqrt(2.0) * self.jitter(of))
        return sigmas


class HeadPasts:
    """A ring of blocks. A block is closed by the first sample that makes it long enough for the run's age."""

    def __init__(self, heads: int, window_steps: int, block_steps: int) -> None:
        blocks = max(-(-window_steps // block_steps), BLOCKS_OF_A_LIFE) + 1
        self._block_steps = block_steps
        self._values = np.full((blocks, len(SIGNALS), heads), np.nan)
        self._steps = np.zeros(blocks, dtype=np.int64)
        self._rates = np.full(blocks, np.nan)
        self.closed = 0
        """Blocks closed in all."""
        self._jitter = np.full((len(SIGNALS), heads), np.nan)
        self._open = np.full((len(SIGNALS), heads), np.nan)
        """of the open block: for a mean, the sum of rows times the signal"""
        self._open[_MEANS] = 0.0
        self._weight = np.zeros((len(SIGNALS), heads))
        """of a mean: the rows that were summed"""
        self._open_steps = 0
        self._anew = np.zeros((len(SIGNALS), heads))
        """1 where the past is of another measure: it becomes level at the first block of the new one"""

    def restart(self, heads: npt.NDArray[np.bool_]) -> None:
        """From the next sample on the scores of `heads` [N] are others: their past is no measure of them."""
        rows = np.ix_(_OF_SCORES, heads)
        self._anew[rows] = 1.0
        self._open[rows] = np.where(np.isin(_OF_SCORES, _MEANS), 0.0, np.nan)[:, None]
        self._weight[rows] = 0.0

    def add(
        self,
        step: int,
        since_step: int,
        rows: Floats,
        values: Sequence[Floats | None],
        *,
        whole: bool,
        learning_rate: float | None = None,
    ) -> bool:
        """Add one sample, every signal [N] or None where it was not measured, by its reduction; true closes a block.

        rows [N]: the weights of means. whole: no value is NaN, and every head counted rows. A head that recorded no
        value of a signal leaves that signal as it was.
        """
        for open_, weight, value, info in zip(self._open, self._weight, values, SIGNALS.values(), strict=True):
            if value is None:
                continue
            if info.reduction == "mean":
                known = None if whole else ~np.isnan(value)
                weight += rows if known is None else np.where(known, rows, 0.0)
                open_ += rows * value if known is None else np.where(known, rows * value, 0.0)
            elif info.reduction == "largest":
                np.fmax(open_, value, out=open_)
            elif is_finite(value):
                open_[:] = value
            else:
                np.copyto(open_, value, where=np.isfinite(value))
        self._open_steps += step - since_step
        if self._open_steps < min(self._block_steps, step / BLOCKS_OF_A_LIFE):
            return False
        self._rates[self.closed % len(self._rates)] = math.nan if learning_rate is None else learning_rate
        self._close(step)
        return True

    def _close(self, step: int) -> None:
        place = self.closed % len(self._steps)
        block = self._values[place]
        block[:] = self._open
        for signal in _MEANS:
            block[signal] /= self._weight[signal]
        if self._anew.any():
            known = (self._anew > 0) & np.isfinite(block)
            self._values[:, known] = block[known]
            self._anew[known] = 0.0
        if self.closed:
            square = block - self._values[place - 1]
            square *= square
            square *= (1 - _JITTER_MEMORY) / 2
            if not is_finite(self._jitter) or not is_finite(square):
                fresh, unknown = np.isnan(self._jitter), np.isnan(square)
                first = np.where(unknown, self._jitter, square / (1 - _JITTER_MEMORY))
                self._jitter = np.where(fresh | unknown, first, _JITTER_MEMORY * self._jitter + square)
            else:
                self._jitter *= _JITTER_MEMORY
                self._jitter += square
        self._steps[place] = step
        self.closed += 1
        self._open_steps = 0
        self._weight[:] = 0.0
        self._open[_MEANS] = 0.0
        self._open[_LARGEST] = np.nan

    @property
    def last_step(self) -> int:
        """Step at which the last block was closed; 0 before the first."""
        return int(self._steps[(self.closed - 1) % len(self._steps)]) if self.closed else 0

    def growth(self, window_steps: float) -> Growth | None:
        """Over the last `window_steps`; None while fewer than four blocks, or less than three quarters, are held."""
        steps, size, since = self._steps.tolist(), len(self._steps), self.last_step - window_steps
        held = [place % size for place in range(max(self.closed - size, 0), self.closed)]
        order = [place for place in held if steps[place] > since]
        count = len(order)
        if count < 4 or steps[order[-1]] - steps[order[0]] < 0.75 * window_steps:
            return None
        part = min(max(1, count // 6), _LONGEST_PART)
        half = (count - part) // 2
        oldest, newest = order[:part], order[-part:]
        between = sum(steps[place] for place in newest) / part - sum(steps[place] for place in oldest) / part
        first, last, halfway = (
            [self._values[place] for place in places] for places in (oldest, newest, order[half : half + part])
        )
        fall = self._rate_fall(oldest, newest)
        return Growth(first, _mean(last), between, halfway, self._jitter, part, self.last_step, fall)

    def _rate_fall(self, oldest: list[int], newest: list[int]) -> float:
        """By which power of the step the learning rate fell between these blocks, 0 or more."""
        before, now = (float(self._rates[places].mean()) for places in (oldest, newest))
        if not 0 <= now < before:  # it rises, stays, or is not known
            return 0.0
        older, newer = (float(self._steps[places].mean()) for places in (oldest, newest))
        return math.log(before / max(now, _ENDED * before)) / math.log(newer / older)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able, exact to the bit."""
        arrays = {name: wire.Array.of(getattr(self, name)).model_dump() for name in self._ARRAYS}
        return {**arrays, "signals": list(SIGNAL_NAMES), "closed": self.closed, "open_steps": self._open_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back to a saved state. Raises ValueError when it was saved with other heads or another window."""
        names = state.get("signals")
        for name in self._ARRAYS:
            own = getattr(self, name)
            if name in self._LATER and name not in state:  # saved by an older version
                own[:] = self._LATER[name]
                continue
            saved = _open_of_0_1(state) if name == "_open" and names is None else array(state[name])
            if name == "_weight" and saved.ndim == 1:  # it was one for all signals
                saved = np.tile(saved, (len(SIGNALS) if names is None else len(names), 1))
            if own.ndim > 1:
                saved = by_name(saved, names, own)
            elif saved.shape != own.shape:
                raise ValueError(
                    f"the saved history {name} has shape {saved.shape}, this run needs {own.shape}; "
                    "resume with the same heads and the same detector configuration"
                )
            setattr(self, name, saved)
        self.closed, self._open_steps = int(state["closed"]), int(state["open_steps"])

    _ARRAYS = ("_values", "_steps", "_rates", "_jitter", "_open", "_weight", "_anew")
    _LATER: Final = {"_anew": 0.0, "_rates": math.nan}
    """What an older version did not save, and what it then is."""


def _mean(blocks: Sequence[Floats]) -> Floats:
    """Of arrays of one shape."""
    total: Floats = blocks[0] + blocks[1] if len(blocks) > 1 else blocks[0].copy()
    for block in blocks[2:]:
        total += block
    total /= len(blocks)
    return total


def away(start: Floats, end: Floats) -> Floats:
    """From start to end, positive where the magnitude grew."""
    moved = end - start
    change: Floats = np.copysign(moved, moved * end)
    return change


def array(saved: Any) -> npt.NDArray[Any]:
    """An array of a saved state."""
    return wire.Array.model_validate(saved).numpy()


def _open_of_0_1(state: dict[str, Any]) -> Floats:
    """The open block of a state that was saved before signals were told by name."""
    sums, peak, norm = (array(state[name]) for name in ("_sums", "_peak", "_norm"))
    return np.stack([sums[0], peak, sums[1], norm])


def lower_median(values: Floats) -> Floats:
    """Along the last axis, NaN left out; NaN where nothing is known."""
    if not np.isnan(values.max(initial=-math.inf)):
        place = (values.shape[-1] - 1) // 2
        half: Floats = np.partition(values, place, axis=-1)[..., place]
        return half
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
