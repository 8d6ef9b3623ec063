"""Of how many rows a layer counts ties, shifts and delta bias: of all near a warning, of few while it is quiet.

The kernels look at one in k blocks of 128 rows, by a k and a tick in device memory (`cadence` of `flash_attention`).
Here k is set, layer by layer, from what the detectors say of its heads. Offsets and scores, which most warnings rest
on, are those of all rows under any k.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreshock.contract.slots import Slot, Words

NEAR: Final = 0.6
"""Risk of a head from which its layer counts all rows; 1 is a warning. Below it the detectors leave out conditions."""
DRIFTING: Final = 0.2
"""The same of how near its offset alone is: 2 nats where no delta bias is known to push, which the thinned one of a
quiet layer may not show (docs/detectors.md has what other values cost)."""
LEAST_ROWS: Final = 64 * 128
"""Rows of each head that a sample looks at, at least.

A warning about ties asks for a share of 0.3 that was a third of that, a change of 0.2, and for 4 of its standard
errors. The change lies between two ends, so an end must be known to 0.2 / (4 sqrt 2) = 0.035. If all rows of a block of
128 are alike, that takes 0.3 * 0.7 / 0.035^2 = 170 blocks. An end is the mean of three blocks of the detectors or more,
and each of these of one sample or more, which leaves 57 for a sample; 64 is the next power of two."""


class Thinning:
    """k of every layer. `cadence` is int64 [L, 2], k and tick of each layer, in device memory; `heads` are its heads'
    numbers.

    A layer goes to k = 1 with the first sample after which it is near a warning: a head's risk is NEAR or it is
    DRIFTING, one of its heads is switched, or every step is sampled since a warning is fresh. It goes back to
    `every_blocks`, or as far as its rows allow, when that has been over for `hold_steps`. In the first `young_steps` of
    a run all is counted: that is what delta bias is accumulated from, and where most recorded failures began.
    """

    def __init__(
        self, cadence: Tensor, heads: Sequence[int], *, every_blocks: int, hold_steps: int, young_steps: int
    ) -> None:
        self._cadence: Final = cadence
        self._first: Final = np.cumsum([0, *heads])[:-1]
        self._most: Final = every_blocks
        self._hold: Final = hold_steps
        self._young: Final = young_steps
        self._whole_until = np.full(len(heads), -1, dtype=np.int64)
        self.every: npt.NDArray[np.int64] = np.ones(len(heads), dtype=np.int64)
        """k of each layer [L], as device memory holds it."""

    def follow(
        self,
        words: Words,
        near: npt.NDArray[np.bool_] | None,
        modes: npt.NDArray[np.int32],
        step: int,
        watch_until: int = -1,
    ) -> None:
        """Set k after a sample, of `words` [N, SLOT_COUNT], was judged.

        near [N]: `near_a_warning` of every head; None where nobody knows, and all rows are counted. modes [N]: those of
        the next step. watch_until: up to this step every step is sampled, since a warning is fresh.
        """
        if near is None or step < watch_until:
            near = np.ones(len(words), dtype=np.bool_)
        whole = np.logical_or.reduceat(near | (modes != 0), self._first)
        self._whole_until[whole] = step + self._hold
        np.minimum(self._whole_until, step + self._hold, out=self._whole_until)  # a run may be set back
        most = np.minimum.reduceat(words[:, Slot.ROWS], self._first) // LEAST_ROWS
        quiet = (step >= self._whole_until) & (step >= self._young)
        every = np.where(quiet, np.clip(most, 1, self._most), 1)
        if (every != self.every).any():
            self.every = every
            self._write()

    def _write(self) -> None:
        source = torch.from_numpy(self.every.copy())
        if self._cadence.is_cuda:
            source = source.pin_memory()
        self._cadence[:, 0].copy_(source, non_blocking=True)  # in place: graphs and captured steps hold this memory


def new_cadence(layers: int, device: torch.device) -> Tensor:
    """k = 1 and tick 0 of so many layers, int64 [L, 2]."""
    return torch.tensor([[1, 0]], device=device).repeat(layers, 1)
