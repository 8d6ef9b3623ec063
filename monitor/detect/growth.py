"""The past of every head in blocks of steps, and how far a signal has moved over a window of it."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.readings import is_finite
from foreshock.monitor.detect.signals import SIGNAL_NAMES, SIGNALS, HeadSignal, Part, by_name

_MEANS: Final = [row for row, info in SIGNALS.items() if info.reduction == "mean"]
_OF_SCORES: Final = np.array([int(row) for row, info in SIGNALS.items() if info.of_scores])
_JITTER_MEMORY: Final = 0.9
"""Weight of the past in the running square of the difference between neighbouring blocks."""
BLOCKS_OF_A_LIFE: Final = 40
"""A young run is seen in finer blocks: one is as long as this part of the run's life, up to `block_steps`."""
_ENDED: Final = 1e-9
"""A learning rate that fell to this part, or to nothing, moves nothing any more."""
_LONGEST_PART: Final = 4
"""Blocks that start, middle and end are means of; fewer in a short window."""
_EVIDENCE: Final = {name: (signal, part) for signal, info in SIGNALS.items() for name, part in info.evidence.items()}

Of = tuple[HeadSignal | slice, Any]
"""A signal or several, and of which heads: indices, or a slice."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How every signal of every head moved over a window, [len(SIGNALS), N]; NaN where it was not recorded.

    What few heads are asked for is worked out for those.
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
    _starts: dict[HeadSignal, Floats] = field(default_factory=dict, init=False, repr=False, compare=False)
    _changes: dict[HeadSignal, Floats] = field(default_factory=dict, init=False, repr=False, compare=False)
    """of every head, by signal: several conditions ask for them"""

    def starts(self, signal: HeadSignal) -> Floats:
        """The mean at the start, of every head [N]."""
        if signal not in self._starts:
            self._starts[signal] = _mean([block[signal] for block in self._oldest])
        return self._starts[signal]

    def changes(self, signal: HeadSignal) -> Floats:
        """Away from the start, of every head [N]."""
        if signal not in self._changes:
            self._changes[signal] = away(self.starts(signal), self.end[signal])
        return self._changes[signal]

    def start(self, of: Of) -> Floats:
        """The mean at the start."""
        signal, heads = of
        if isinstance(signal, slice):
            return np.array([self.start((each, heads)) for each in tuple(HeadSignal)[signal]])
        start: Floats = self.starts(signal)[heads]
        return start

    def middle(self, of: Of) -> Floats:
        """The mean halfway between start and end."""
        signal, heads = of
        return _mean([block[signal][..., heads] for block in self._halfway])

    def jitter(self, of: Of) -> Floats:
        """Standard error of each of start, middle and end."""
        signal, heads = of
        error: Floats = np.sqrt(self._jitter[signal][..., heads] / self._blocks)
        return error

    def evidence(self, heads: Sequence[int]) -> dict[str, Floats]:
        """What verdicts show of these heads, by name, [len(heads)]."""
        parts, places = _EVIDENCE.items(), np.array(heads)
        named = {name: self._part(part, (signal, places)) for name, (signal, part) in parts}
        return named | {"window_steps": np.full(len(heads), self.steps)}

    def _part(self, part: Part, of: Of) -> Floats:
        signal, heads = of
        found: Floats = (
            self.jitter(of) if part == "jitter" else self.end[signal][heads] if part == "end" else self.start(of)
        )
        return found

    def change(self, of: Of) -> Floats:
        """Away from the start, positive when the magnitude grew."""
        signal, heads = of
        return away(self.start(of), self.end[signal][..., heads])

    def sigmas(self, of: Of) -> Floats:
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
        self._any_anew = False

    def restart(self, heads: npt.NDArray[np.bool_]) -> None:
        """From the next sample on the scores of `heads` [N] are others: their past is no measure of them."""
        rows = np.ix_(_OF_SCORES, heads)
        self._anew[rows], self._any_anew = 1.0, True
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
        for signal, info in SIGNALS.items():
            if info.reduction == "mean":
                np.divide(self._open[signal], self._weight[signal], out=block[signal])
            else:
                block[signal] = self._open[signal]
        if self._any_anew:
            known = (self._anew > 0) & np.isfinite(block)
            self._values[:, known] = block[known]
            self._anew[known] = 0.0
            self._any_anew = bool(self._anew.any())
        if self.closed:
            square = block - self._values[place - 1]
            square *= square
            square *= (1 - _JITTER_MEMORY) / 2
            jitter = _JITTER_MEMORY * self._jitter
            jitter += square
            if not is_finite(jitter):
                fresh, unknown = np.isnan(self._jitter), np.isnan(square)
                first = np.where(unknown, self._jitter, square / (1 - _JITTER_MEMORY))
                jitter = np.where(fresh | unknown, first, jitter)
            self._jitter = jitter
        self._steps[place] = step
        self.closed += 1
        self._open_steps = 0
        self._weight[:] = 0.0
        for signal, info in SIGNALS.items():
            if info.reduction != "last":
                self._open[signal] = 0.0 if info.reduction == "mean" else np.nan

    @property
    def last_step(self) -> int:
        """Step at which the last block was closed; 0 before the first."""
        return int(self._steps[(self.closed - 1) % len(self._steps)]) if self.closed else 0

    def growth(self, window_steps: float) -> Growth | None:
        """Over the last `window_steps`; None while fewer than four blocks, or less than three quarters, are held."""
        turn = self.closed % len(self._steps)  # the ring from its oldest block on; steps never fall
        steps = self._steps.tolist()
        steps = steps[turn:] + steps[:turn] if self.closed >= len(steps) else steps[:turn]
        count = len(steps) - bisect_right(steps, self.last_step - window_steps)
        if count < 4 or steps[-1] - steps[-count] < 0.75 * window_steps:
            return None
        part = min(max(1, count // 6), _LONGEST_PART)
        older, newer = sum(steps[-count:][:part]) / part, sum(steps[-part:]) / part
        oldest, halfway, newest = (
            [(first + place) % len(self._steps) for place in range(part)]
            for first in (self.closed - count, self.closed - count + (count - part) // 2, self.closed - part)
        )
        fall = self._rate_fall(oldest, newest, older, newer)
        start, middle, end = ([self._values[place] for place in places] for places in (oldest, halfway, newest))
        return Growth(start, _mean(end), newer - older, middle, self._jitter, part, self.last_step, fall)

    def _rate_fall(self, oldest: list[int], newest: list[int], older: float, newer: float) -> float:
        """By which power of the step the learning rate fell between these blocks, 0 or more.

        older, newer: the mean of their steps.
        """
        rates = self._rates.tolist()
        before, now = (reduce(add, [rates[place] for place in places]) / len(places) for places in (oldest, newest))
        if not 0 <= now < before:  # it rises, stays, or is not known
            return 0.0
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
        self._any_anew = bool(self._anew.any())
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
    if not math.isnan(values.max(initial=-math.inf)):
        place = (values.shape[-1] - 1) // 2
        half: Floats = np.partition(values, place, axis=-1)[..., place]
        return half
    ordered = np.sort(values, axis=-1)  # NaN last
    middle = np.maximum(np.count_nonzero(~np.isnan(values), axis=-1) - 1, 0) // 2
    median: Floats = np.take_along_axis(ordered, middle[..., None], axis=-1)[..., 0]
    return median


def median_of_others(values: Floats) -> Floats:
    """For every place of values [n], the lower median of the other places; NaN where there is none."""
    unknown = np.isnan(values)
    ordered = np.sort(values).tolist()  # NaN last
    known = len(ordered) - np.count_nonzero(unknown)
    median = np.full(len(ordered), math.nan)
    if known > 1:
        middle = (known - 2) // 2
        median[:] = np.where(values <= ordered[middle], ordered[middle + 1], ordered[middle])  # the own is skipped
    if known and known < len(ordered):
        median[unknown] = ordered[(known - 1) // 2]
    return median
