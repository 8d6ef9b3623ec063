"""The past of the heads, beside one that is kept and averaged number by number."""

import math
from collections.abc import Callable
from statistics import median_low
from typing import Any

import numpy as np
import pytest

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.growth import HeadPasts, lower_median, median_of_others
from foreshock.monitor.detect.signals import SIGNALS

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
        elif self.reduction == "largest":
            block = max(values, default=math.nan)
            self.open = []
        else:  # the last one measured stands until it is measured again
            block = values[-1] if values else math.nan
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


def drawn(rng: np.random.Generator, heads: int, *, unknown: float) -> list[Floats | None]:
    """A sample of every signal, some of it not known."""
    values = []
    for _ in SIGNALS:
        value = rng.normal(2.0, 3.0, heads)
        value[rng.random(heads) < unknown] = np.nan
        values.append(None if rng.random() < unknown / 2 else value)
    return values


@pytest.mark.parametrize("unknown", [0.0, 0.15])
@pytest.mark.parametrize("seed", [3, 4])
def test_growth_is_what_single_numbers_give_at_every_age_of_the_run(seed: int, unknown: float) -> None:
    rng, heads = np.random.default_rng(seed), 3
    pasts = HeadPasts(heads, WINDOW, BLOCK)
    single = {(s, h): OneByOne(info.reduction) for s, info in SIGNALS.items() for h in range(heads)}
    step, seen = 0, 0
    while step < 2400:
        since, step = step, step + int(rng.integers(1, 45))
        rows = rng.integers(1, 9, heads).astype(np.float64)
        values = drawn(rng, heads, unknown=unknown)
        with np.errstate(invalid="ignore"):  # as the detectors call it: the mean of no rows is not known
            pasts.add(step, since, rows, values, whole=not unknown)
        for (signal, head), one in single.items():
            value = values[list(SIGNALS).index(signal)]
            one.add(step, since, rows[head], math.nan if value is None else float(value[head]))
        window = min(pasts.last_step / 2, WINDOW)
        found = pasts.growth(window)
        for (signal, head), one in single.items():
            wanted = one.growth(window)
            assert (found is None) == (wanted is None)
            if found is None or wanted is None:
                continue
            of: Any = (signal, [head])
            told = (found.start(of)[0], found.middle(of)[0], found.end[signal, head], found.jitter(of)[0])
            np.testing.assert_allclose((*told, found.steps), wanted, rtol=1e-9, atol=1e-9)
            seen += 1
    assert seen > 300


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_medians_are_the_lower_ones_of_what_is_known_and_of_all_but_oneself(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(60):
        values = rng.integers(0, 5, int(rng.integers(1, 8))).astype(np.float64)  # equal ones among them
        values[rng.random(len(values)) < 0.3] = np.nan

        def lower(known: list[float]) -> float:
            return median_low(known) if known else math.nan

        others = [
            lower([v for place, v in enumerate(values) if place != own and not math.isnan(v)])
            for own in range(len(values))
        ]
        np.testing.assert_array_equal(lower_median(values), lower([v for v in values if not math.isnan(v)]))
        np.testing.assert_array_equal(median_of_others(values), others)


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
        values: list[Floats | None] = [np.full(3, 1.0 + step) for _ in SIGNALS]
        pasts.add(step, since, np.ones(3), values, whole=True, learning_rate=rate(step))

    pasts = HeadPasts(3, 4000, 100)
    for step in range(50, 6001, 50):
        at(step, step - 50, pasts)
    growth = pasts.growth(3000)
    assert growth is not None
    assert growth.step == 6000
    assert growth.rate_fall == pytest.approx(expected, abs=0.05)
    restored = HeadPasts(3, 4000, 100)
    restored.load_state_dict(pasts.state_dict())
    again = restored.growth(3000)
    assert again is not None
    assert again.rate_fall == growth.rate_fall


def test_a_rate_that_fell_to_nothing_moves_nothing_and_a_state_without_rates_is_read() -> None:
    pasts = HeadPasts(1, 4000, 100)
    for step in range(50, 6001, 50):
        values: list[Floats | None] = [np.full(1, 1.0 + step) for _ in SIGNALS]
        pasts.add(step, step - 50, np.ones(1), values, whole=True, learning_rate=1e-3 * (step < 5000))
    growth = pasts.growth(3000)
    assert growth is not None
    assert growth.rate_fall > 20
    old = {name: value for name, value in pasts.state_dict().items() if name != "_rates"}
    restored = HeadPasts(1, 4000, 100)
    restored.load_state_dict(old)
    again = restored.growth(3000)
    assert again is not None
    assert again.rate_fall == 0.0
