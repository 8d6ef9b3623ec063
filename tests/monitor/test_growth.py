"""The past of the heads, beside one that is kept and averaged number by number."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.growth import HeadPasts, HeadSignal

WINDOW, BLOCK, MEMORY = 900, 60, 0.9


class OneByOne:
    """What `HeadPasts` keeps of one signal of one head, kept as lists of plain numbers."""

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction
        self.blocks: list[tuple[int, float]] = []
        self.open: list[tuple[float, float]] = []
        self.open_steps, self.jitter = 0, math.nan

    def add(self, step: int, since: int, rows: float, value: float) -> None:
        if not math.isnan(value):
            self.open.append((rows, value))
        self.open_steps += step - since
        if self.open_steps >= min(BLOCK, step / 40):
            self._close(step)

    def _close(self, step: int) -> None:
        values = [value for _, value in self.open]
        if self.reduction == "mean":
            rows = sum(rows for rows, _ in self.open)
            block = sum(rows * value for rows, value in self.open) / rows if rows else math.nan
            self.open = []
        else:
            block = max(values, default=math.nan)
            self.open = []
        if self.blocks:
            half_square = (block - self.blocks[-1][1]) ** 2 / 2
            if math.isnan(self.jitter):
                self.jitter = half_square
            elif not math.isnan(half_square):
                self.jitter = MEMORY * self.jitter + (1 - MEMORY) * half_square
        self.blocks.append((step, block))
        self.open_steps = 0

    def growth(self, window: float) -> tuple[float, float, float, float, float] | None:
        """Start, middle, end, standard error of each, and the steps between the centres of start and end."""
        kept = self.blocks[-(max(-(-WINDOW // BLOCK), 40) + 1) :]
        last = kept[-1][0] if kept else 0
        kept = [block for block in kept if block[0] > last - window]
        if len(kept) < 4 or kept[-1][0] - kept[0][0] < 0.75 * window:
            return None
        part = min(max(1, len(kept) // 6), 4)
        half = (len(kept) - part) // 2
        ends = kept[:part], kept[half : half + part], kept[-part:]
        start, middle, end = (math.fsum(value for _, value in blocks) / part for blocks in ends)
        between = (sum(step for step, _ in ends[2]) - sum(step for step, _ in ends[0])) / part
        return start, middle, end, math.sqrt(self.jitter / part), between


def drawn(rng: np.random.Generator, heads: int, *, unknown: float) -> Floats:
    """A sample of offsets and scores [2, N], some of it not known."""
    values = rng.normal(2.0, 3.0, (2, heads))
    values[rng.random(values.shape) < unknown] = np.nan
    return values


@pytest.mark.parametrize("unknown", [0.0, 0.15])
@pytest.mark.parametrize("seed", [3, 4])
def test_growth_is_what_single_numbers_give_at_every_age_of_the_run(seed: int, unknown: float) -> None:
    rng, heads = np.random.default_rng(seed), 3
    pasts = HeadPasts.begin(heads, WINDOW, BLOCK)
    kinds = {HeadSignal.OFFSET: "mean", HeadSignal.SCORE: "largest"}
    single = {(signal, h): OneByOne(kind) for signal, kind in kinds.items() for h in range(heads)}
    step, seen = 0, 0
    while step < 2400:
        since, step = step, step + int(rng.integers(1, 45))
        rows = rng.integers(1, 9, heads).astype(np.float64)
        values = drawn(rng, heads, unknown=unknown)
        with np.errstate(invalid="ignore"):  # as the detectors call it: the mean of no rows is not known
            pasts.add(step, since, rows, *values)
        for (signal, head), one in single.items():
            one.add(step, since, rows[head], float(values[signal, head]))
        window = min(pasts.last_step / 2, WINDOW)
        found = pasts.growth(window)
        for (signal, head), one in single.items():
            wanted = one.growth(window)
            assert (found is None) == (wanted is None)
            if found is None or wanted is None:
                continue
            told = [float(part[signal, head]) for part in (found.start, found.middle, found.end, found.error)]
            np.testing.assert_allclose((*told, found.steps), wanted, rtol=1e-9, atol=1e-9)
            seen += 1
    assert seen > 300


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (lambda step: 3e-4, 0.0),
        (lambda step: 1e-3 * step, 0.0),
        (lambda step: None, 0.0),
        (lambda step: None if step < 4000 else 1e-3 / step, 0.0),
        (lambda step: step**-0.5, 0.5),
        (lambda step: 7.0 * step**-2.0, 2.0),
        (lambda step: math.exp(-step / 2000), 2.2),
    ],
)
def test_a_falling_rate_is_told_by_the_power_of_the_step_that_it_falls_by(
    rate: Callable[[int], float | None], expected: float
) -> None:
    def at(step: int, since: int, pasts: HeadPasts) -> None:
        both = np.full(3, 1.0 + step)
        pasts.add(step, since, np.ones(3), both, both, rate=rate(step))

    pasts = HeadPasts.begin(3, 4000, 100)
    for step in range(50, 6001, 50):
        at(step, step - 50, pasts)
    growth = pasts.growth(3000)
    assert growth is not None
    assert growth.step == 6000
    assert growth.rate_fall == pytest.approx(expected, abs=0.05)


def test_a_rate_that_fell_to_nothing_moves_nothing() -> None:
    pasts = HeadPasts.begin(1, 4000, 100)
    for step in range(50, 6001, 50):
        both = np.full(1, 1.0 + step)
        pasts.add(step, step - 50, np.ones(1), both, both, rate=1e-3 * (step < 5000))
    growth = pasts.growth(3000)
    assert growth is not None
    assert growth.rate_fall > 20
