"""Test sequentially, with forgetting, whether the delta bias of a head has a persistent sign.

The null hypothesis is that the delta bias of a bet is positive or negative with equal probability, given the past. Then
1 + b g is a fair bet, where g is the bias in units of its usual size so far, clipped to [-1, 1], and b is the stake.
The capital of such bets, of which a small part is reserved for bets that begin later, is an e-process: the probability
that it reaches c within T bets is at most (1 + T / MEMORY_BETS) / c (Ville's inequality; Shafer, "Testing by betting",
JRSS A 2021; the mixture over beginnings is that of the e-detectors of Shin, Ramdas and Rinaldo, arXiv 2203.03532).
A spike counts like any other large bet, the usual size adapts when gradients change in size, and old gains are lost
within about 100 bets without evidence.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.growth import SavedFloats

MEMORY_BETS: Final = 1000
"""The number of bets for which the error rate is stated. A bet is on a block, so this is about 100,000 steps."""
CHANCE: Final = 0.05
"""Probability that noise supports the drift of any drifting head within this many bets."""
ASKED: Final = 2 / CHANCE
"""Capital that supports a drift, to be multiplied by the number of heads that drift at the same time."""
_STAKE: Final = 0.6
_MOST: Final = 1e6
"""Upper limit of the capital."""
SAMPLES_OF_A_BET: Final = 10
"""Half of the capital bets on at most this many samples. The gain of a bet is bounded, so a block gives several bets if
every step is sampled. The other half bets on whole blocks, because a weak bias in few rows would not win."""
_USUAL_BETS: Final = 20
_FIRST_BETS: Final = 3
"""Bets that only measure the usual size, without a gain."""
_OUTLIER: Final = 3.0


@dataclass(slots=True, kw_only=True)
class BiasEvidence:
    """The evidence of N heads, from bets on a few samples and from bets on blocks, [2, N]."""

    capital: SavedFloats
    """capital of the bets that the bias is negative and of those that it is positive, [2, 2, N]"""
    usual: SavedFloats
    """usual size of a bet's bias, divided by the square root of its rows"""
    bets: SavedFloats
    """number of bets with a bias other than 0"""
    pending: SavedFloats
    """delta bias and rows: first since the last bet on samples, then of the block before that, [2, 2, N]"""
    open_samples: int = 0
    """samples since the last bet on samples"""
    apart: bool = False
    """whether any block contained more samples than a bet; before, bets on blocks and on samples are the same"""

    @classmethod
    def begin(cls, heads: int) -> Self:
        """Return the evidence before the first bet."""
        usual, bets = np.zeros((2, 2, heads))
        return cls(capital=np.ones((2, 2, heads)), usual=usual, bets=bets, pending=np.zeros((2, 2, heads)))

    def forget(self, heads: npt.NDArray[np.bool_]) -> None:
        """Reset the evidence of these heads, because their mode changed."""
        self.capital[..., heads] = 1.0
        for part in (self.usual, self.bets, self.pending):
            part[..., heads] = 0.0

    def drop_open(self) -> None:
        """Drop the samples since the last bets."""
        self.pending[: 1 + self.apart] = self.open_samples = 0

    def add(self, bias: Floats, rows: Floats, *, finite: bool = False) -> None:
        """Add a sample: the sum of the delta bias, [N], over its rows. finite: whether all sums are known to be
        finite."""
        if self.open_samples >= SAMPLES_OF_A_BET:
            if not self.apart:
                self.apart = True
                for part in (self.capital, self.usual, self.bets):
                    part[1] = part[0]
            self._bet(0)
            self._carry()
        bias_since, rows_since = self.pending[0]
        bias_since += bias if finite else np.where(np.isfinite(bias), bias, 0.0)
        rows_since += rows
        self.open_samples += 1

    def close(self) -> None:
        """Bet on the block that ends, and on its samples since the last bet."""
        self._bet(0)
        if self.apart:
            self._carry()
            self._bet(1)
        self.drop_open()

    def _carry(self) -> None:
        """Move the samples of the last bet to the pending bet on their block."""
        self.pending[1] += self.pending[0]
        self.pending[0] = self.open_samples = 0

    def _bet(self, pace: int) -> None:
        bias, rows = self.pending[pace]
        size = bias / np.sqrt(np.maximum(rows, 1.0))
        usual, bets = self.usual[pace], self.bets[pace]
        # Conditions that are true for all heads are checked only once, because these are the slowest operations at the
        # end of a block.
        unit = usual if bets.min(initial=_FIRST_BETS) >= _FIRST_BETS else np.where(bets >= _FIRST_BETS, usual, np.inf)
        won = np.minimum(np.maximum(size / unit, -1.0), 1.0)
        negative, positive = capital = self.capital[pace]
        gain = capital * (_STAKE * won)
        negative -= gain[0]
        positive += gain[1]
        np.subtract(1.0, capital, out=gain)
        gain /= MEMORY_BETS
        capital += gain
        np.minimum(capital, _MOST, out=capital)
        showed = size != 0
        bets += showed
        change = np.minimum(np.abs(size), _OUTLIER * unit)
        change -= usual
        few = bets.min(initial=_USUAL_BETS) < _USUAL_BETS
        change /= np.minimum(np.maximum(bets, 1.0), _USUAL_BETS) if few else _USUAL_BETS
        usual += change if showed.all() else change * showed

    def of(self, direction: Floats) -> Floats:
        """Return the capital of the bets that each head's bias has this sign, [N]; 1 means no gain."""
        negative, positive = self.capital.mean(axis=0) if self.apart else self.capital[0]
        below = (direction < 0).astype(np.float64)  # faster than np.where, which branches on unpredictable signs
        won: Floats = below * negative + (1.0 - below) * positive
        return won
