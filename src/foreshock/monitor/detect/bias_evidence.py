"""Whether the delta bias of a head pushes one way: a sequential test that forgets.

The null hypothesis is that a block's delta bias is as likely positive as negative, whatever came before. Then 1 + b g
is a fair bet, where g is the bias in units of its usual size so far, cut off at 1, and b the stake. What such bets win,
with a small part of the capital set aside for bets that begin later, is an e-process: the chance that it ever comes to
c within T blocks is at most (1 + T / MEMORY_BLOCKS) / c (Ville's inequality; Shafer, "Testing by betting", JRSS A 2021;
the mixture over beginnings is that of the e-detectors of Shin, Ramdas and Rinaldo, arXiv 2203.03532).
A spike weighs as much as any large block, gradients of another size are measured by their own size soon, and what was
won long ago is lost again within some 100 blocks that show nothing.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.growth import SavedFloats

MEMORY_BLOCKS: Final = 1000
"""Blocks, about 100,000 steps, for which the error is stated."""
CHANCE: Final = 0.05
"""That noise supports any of the heads that drift, within so many blocks."""
ASKED: Final = 2 / CHANCE
"""Capital that supports a drift, times the number of heads that drift at that time."""
_STAKE: Final = 0.6
_MOST: Final = 1e6
"""What was won beyond is forgotten."""
_USUAL_BLOCKS: Final = 20
_FIRST_BLOCKS: Final = 3
"""Blocks that show what is usual before the first bet."""
_OUTLIER: Final = 3.0


@dataclass(slots=True, kw_only=True)
class BiasEvidence:
    """Of N heads."""

    capital: SavedFloats
    """of the bets that the bias is negative and that it is positive, [2, N]"""
    usual: SavedFloats
    """size of a block's bias for each root of a row, [N]"""
    blocks: SavedFloats
    """that showed any, [N]"""

    @classmethod
    def begin(cls, heads: int) -> Self:
        """Of heads that nothing is known of yet."""
        return cls(capital=np.ones((2, heads)), usual=np.zeros(heads), blocks=np.zeros(heads))

    def forget(self, heads: npt.NDArray[np.bool_]) -> None:
        """Begin anew for these heads, whose mode has changed."""
        self.capital[:, heads], self.usual[heads], self.blocks[heads] = 1.0, 0.0, 0.0

    def add(self, bias: Floats, rows: Floats) -> None:
        """Bet on one block: the sum of its delta bias, [N], over its rows."""
        size = bias / np.sqrt(np.maximum(rows, 1.0))
        known = self.blocks >= _FIRST_BLOCKS
        won = np.divide(size, self.usual, out=np.zeros_like(size), where=known & (self.usual > 0))
        won = _STAKE * np.clip(won, -1.0, 1.0)
        self.capital[0] -= self.capital[0] * won
        self.capital[1] += self.capital[1] * won
        self.capital += (1.0 - self.capital) / MEMORY_BLOCKS
        np.minimum(self.capital, _MOST, out=self.capital)
        np.abs(size, out=size)
        np.minimum(size, _OUTLIER * self.usual, out=size, where=known)
        showed = size > 0
        self.blocks += showed
        self.usual += (size - self.usual) / np.clip(self.blocks, 1.0, _USUAL_BLOCKS) * showed

    def of(self, direction: Floats) -> Floats:
        """The capital that was won on each head's bias having this sign, [N]; 1 is none."""
        return np.where(direction < 0, self.capital[0], self.capital[1])
