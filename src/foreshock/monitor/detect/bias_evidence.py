"""Whether the delta bias of a head pushes one way: a sequential test that forgets.

The null hypothesis is that the delta bias of a bet is as likely positive as negative, whatever came before. Then
1 + b g is a fair bet, where g is the bias in units of its usual size so far, cut off at 1, and b the stake. What such
bets win, with a small part of the capital set aside for bets that begin later, is an e-process: the chance that it ever
comes to c within T bets is at most (1 + T / MEMORY_BETS) / c (Ville's inequality; Shafer, "Testing by betting", JRSS A
2021; the mixture over beginnings is that of the e-detectors of Shin, Ramdas and Rinaldo, arXiv 2203.03532).
A spike weighs as much as any large bet, gradients of another size are measured by their own size soon, and what was won
long ago is lost again within some 100 bets that show nothing.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.growth import SavedFloats

MEMORY_BETS: Final = 1000
"""For which the error is stated. A bet is on a block, so these are about 100,000 steps."""
CHANCE: Final = 0.05
"""That noise supports any of the heads that drift, within so many bets."""
ASKED: Final = 2 / CHANCE
"""Capital that supports a drift, times the number of heads that drift at that time."""
_STAKE: Final = 0.6
_MOST: Final = 1e6
"""What was won beyond is forgotten."""
SAMPLES_OF_A_BET: Final = 10
"""Half of the capital bets on so many samples at most: the gain of a bet is bounded, so a block of which every step is
sampled is several bets. The other half bets on whole blocks, since what few rows show of a push is too weak to win."""
_USUAL_BETS: Final = 20
_FIRST_BETS: Final = 3
"""That show what is usual, and win nothing."""
_OUTLIER: Final = 3.0


@dataclass(slots=True, kw_only=True)
class BiasEvidence:
    """Of N heads, for bets on a few samples and for bets on blocks, [2, N]."""

    capital: SavedFloats
    """of the bets that the bias is negative and that it is positive, [2, 2, N]"""
    usual: SavedFloats
    """size of a bet's bias for each root of a row"""
    bets: SavedFloats
    """that showed any"""
    pending: SavedFloats
    """delta bias and rows since the last bet on samples, and of the block up to then, [2, 2, N]"""
    open_samples: int = 0
    """since the last bet on samples"""
    apart: bool = False
    """whether a block has held more samples than a bet; until then blocks make no bets of their own"""

    @classmethod
    def begin(cls, heads: int) -> Self:
        """Of heads that nothing is known of yet."""
        usual, bets = np.zeros((2, 2, heads))
        return cls(capital=np.ones((2, 2, heads)), usual=usual, bets=bets, pending=np.zeros((2, 2, heads)))

    def forget(self, heads: npt.NDArray[np.bool_]) -> None:
        """Begin again for these heads, whose mode has changed."""
        self.capital[..., heads] = 1.0
        for part in (self.usual, self.bets, self.pending):
            part[..., heads] = 0.0

    def drop_open(self) -> None:
        """Forget the samples since the last bets."""
        self.pending[: 1 + self.apart] = self.open_samples = 0

    def add(self, bias: Floats, rows: Floats, *, finite: bool = False) -> None:
        """Add a sample: the sum of its delta bias, [N], over its rows. finite: whether all of it is known to be."""
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
        """Bet on the block that closes, and on its samples since the last bet."""
        self._bet(0)
        if self.apart:
            self._carry()
            self._bet(1)
        self.drop_open()

    def _carry(self) -> None:
        """Add what was bet on to its block."""
        self.pending[1] += self.pending[0]
        self.pending[0] = self.open_samples = 0

    def _bet(self, pace: int) -> None:
        bias, rows = self.pending[pace]
        size = bias / np.sqrt(np.maximum(rows, 1.0))
        usual, bets = self.usual[pace], self.bets[pace]
        # What holds of every head is not asked of each: these are the longest passes of a block's end.
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
        """The capital that was won on each head's bias having this sign, [N]; 1 is none."""
        negative, positive = self.capital.mean(axis=0) if self.apart else self.capital[0]
        below = (direction < 0).astype(np.float64)  # np.where guesses wrong at every other head
        won: Floats = below * negative + (1.0 - below) * positive
        return won
