"""What a head is warned about, one entry for each signal: how it is read, joined over a block, judged and said.

To add one: an entry here, its thresholds in thresholds.py, and its reading in readings.py where it is not read yet
(with what makes a sample whole there, where every sample tells it).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.readings import Readings
from foreshock.monitor.detect.thresholds import DetectorConfig

DANGEROUS_SCORE: Final = 512.0
"""Where rounding q and k to bf16 moves a score by about 1; forecasts count the steps until then."""

Reduction = Literal["mean", "largest", "last"]
Part = Literal["end", "start", "jitter"]
"""Of a signal's growth over a window."""
Least = float | Floats
"""A threshold, one for all heads or one each [N]."""


class Drifting(NamedTuple):
    """How the scores of heads move, [N] each."""

    together: npt.NDArray[np.bool_]
    """as a whole, as far as is known: softmax does not see that"""
    pushed: npt.NDArray[np.bool_]
    """as a whole, and the way that the delta bias pushes"""


class HeadSignal(IntEnum):
    """Row of a signal in arrays [len(SIGNALS), N]; its name in small letters is what a verdict tells."""

    OFFSET = 0
    SCORE = 1
    TIES = 2
    NORM = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalInfo:
    """All that is known of one signal."""

    read: Callable[[Readings], Floats | None]
    """[N] of a sample, NaN where nothing was recorded; None where this sample did not measure it."""
    reduction: Reduction
    """Over the samples of a block: mean weighted by rows, largest, or the last one measured."""
    least: Callable[[DetectorConfig, Drifting, float], Least]
    """The size that warns, given how heads drift, and how young the run is: 1 at its first step, 0 from `settle_steps`
    on."""
    least_growth: Callable[[DetectorConfig, float], float]
    """The growth factor that warns, given how young the run is."""
    pushed: bool = False
    """No head is warned about by it whose delta bias does not push the way it drifts."""
    floor: float = 0.0
    """Added to the size before growth is taken, so that what is next to nothing does not grow by large factors."""
    least_change: Callable[[DetectorConfig], float] | None = None
    """The change over the window that is asked for as well."""
    judged_early_from: float = math.inf
    """Size from which it is judged however young the run is."""
    peers_count_below: float = math.inf
    """Size from which it is judged by itself: where all heads grow past what is dangerous, none is a comfort."""
    beside_own_layer: bool = False
    """A little growth that all heads of a layer share is no warning."""
    goes_on: bool = True
    """Growth must go on in the newer half of the window; not of a share, which cannot grow for ever."""
    ahead_of_score: bool = False
    """It warns of a score that is yet to come. One that is recorded has to be half of what may warn by itself: weights
    that were frozen, or began near zero, grow by large factors, and nothing comes of it."""
    of_scores: bool = True
    """It speaks of the scores that a head computes with, which a mode may move."""
    one_for_a_layer: bool = False
    """Some recordings hold one value for a whole layer: one head of it is named then."""
    evidence: Mapping[str, Part]
    """What a verdict shows of it, by name; first the value that the sentence ends with."""
    says: str
    """What such a head does, in words that go before the value."""
    unit: str = ""

    @property
    def shown(self) -> str:
        """Name of the value in the evidence."""
        return next(iter(self.evidence))


SIGNALS: Final[dict[HeadSignal, SignalInfo]] = {
    HeadSignal.OFFSET: SignalInfo(
        read=lambda readings: readings.score_offset,
        reduction="mean",
        least=lambda config, heads, youth: np.where(heads.pushed, config.offset_level, config.far_offset),
        least_growth=lambda config, youth: 1.0 + youth * (config.young_growth - 1.0),
        pushed=True,
        floor=1.0,
        least_change=lambda config: config.offset_change,
        beside_own_layer=True,
        one_for_a_layer=True,
        evidence={"offset": "end", "offset_before": "start"},
        says="drifts: its scores moved as a whole from",
        unit=" nats",
    ),
    HeadSignal.SCORE: SignalInfo(
        read=lambda readings: readings.largest_score,
        reduction="largest",
        least=lambda config, heads, youth: np.where(
            heads.pushed,
            config.score_level,
            np.where(heads.together, config.score_level * (1.0 + youth), config.score_level * 2.0),
        ),
        least_growth=lambda config, youth: 1.0,
        judged_early_from=DANGEROUS_SCORE / 2,
        peers_count_below=DANGEROUS_SCORE,
        one_for_a_layer=True,
        evidence={"score": "end", "score_before": "start", "score_error": "jitter"},
        says="grows: its largest |score| went from",
    ),
    HeadSignal.TIES: SignalInfo(
        read=lambda readings: readings.tied_rows,
        reduction="mean",
        least=lambda config, heads, youth: config.tied_share,
        least_growth=lambda config, youth: config.tied_growth,
        goes_on=False,
        evidence={"tied_share": "end"},
        says="ties: the share of its rows with several maxima is",
    ),
    HeadSignal.NORM: SignalInfo(
        read=lambda readings: readings.query_norm,
        reduction="last",
        least=lambda config, heads, youth: 0.0,
        least_growth=lambda config, youth: config.norm_growth,
        ahead_of_score=True,
        of_scores=False,
        evidence={"query_norm": "end", "query_norm_before": "start"},
        says="grows: the spectral norm of its W_Q went from",
    ),
}

SIGNAL_NAMES: Final = tuple(signal.name.lower() for signal in SIGNALS)
"""As verdicts tell them, in the order of the rows."""


_NAMES_OF_0_1: Final = ("offset", "score", "ties", "norm")


def by_name(saved: Floats, names: Sequence[str] | None, empty: Floats) -> Floats:
    """Rows [..., len(SIGNALS), N] of a saved state in today's order; a signal that it lacks is as in `empty`.

    names: those of the saved rows; None for a state that was saved before it told them. Raises ValueError when the
    other dimensions differ.
    """
    told = _NAMES_OF_0_1 if names is None else tuple(names)
    if saved.shape != (*empty.shape[:-2], len(told), empty.shape[-1]):
        raise ValueError(
            f"the saved detectors hold an array of shape {saved.shape}, this run needs {empty.shape}; "
            "resume with the same heads and the same detector configuration"
        )
    placed = empty.copy()
    for row, name in enumerate(told):
        if name in SIGNAL_NAMES:
            placed[..., SIGNAL_NAMES.index(name), :] = saved[..., row, :]
    return placed
