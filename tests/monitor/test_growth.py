"""The recorded history of the heads, against a reference that uses plain lists of numbers."""

import math
from typing import Any

import numpy as np
import pytest
from tests.monitor.synthetic_heads import reading

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.growth import HeadPasts, HeadSignal
from foreshock.monitor.detect.readings import Readings

WINDOW, BLOCK, MEMORY = 900, 60, 0.9


def sample(offset: Floats, score: Floats, **fields: Any) -> Readings:
    return reading(50, lambda _: (offset, score), **({"rows": np.ones(len(offset))} | fields))


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


class ScalarHistory:
    """Reference of `HeadPasts` for one signal of one head, as plain lists."""

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction
        self.blocks: list[tuple[int, float]] = []
        self.open: list[tuple[float, float]] = []
        self.open_steps, self.jitter, self.held = 0, math.nan, 0

    def add(self, step: int, since: int, rows: float, value: float) -> None:
        if not math.isnan(value):
            self.open.append((rows, value))
        self.open_steps += step - since
        self.held += step - since
        if self.open_steps >= min(BLOCK, self.held / 40):
            self._close(self.held)

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
        """Start, middle, end, the standard error of each, and the steps between the centres of start and end."""
        recent = self.blocks[-(max(-(-WINDOW // BLOCK), 40) + 1) :]
        if len(recent) < 4:
            return None
        begin = recent[-1][0] - min(self.held / 2, window)
        recent = recent[min(sum(block[0] <= begin for block in recent), len(recent) - 4) :]
        part = min(max(1, len(recent) // 6), 4)
        half = (len(recent) - part) // 2
        ends = recent[:part], recent[half : half + part], recent[-part:]
        start, middle, end = (mean([value for _, value in blocks if not math.isnan(value)]) for blocks in ends)
        between = (sum(step for step, _ in ends[2]) - sum(step for step, _ in ends[0])) / part
        return start, middle, end, math.sqrt(self.jitter / part), between


def random_sample(rng: np.random.Generator, heads: int, *, unknown: float) -> Floats:
    """A sample of offsets and scores [2, N]; a share of the values is unknown (NaN)."""
    values = rng.normal(2.0, 3.0, (2, heads))
    values[rng.random(values.shape) < unknown] = np.nan
    return values


@pytest.mark.parametrize("unknown", [0.0, 0.15])
@pytest.mark.parametrize("seed", [3, 4])
def test_growth_equals_the_scalar_reference_at_every_age_of_the_run(seed: int, unknown: float) -> None:
    rng, heads = np.random.default_rng(seed), 3
    pasts = HeadPasts.begin(heads, WINDOW, BLOCK)
    kinds = {HeadSignal.OFFSET: "mean", HeadSignal.SCORE: "largest"}
    single = {(signal, h): ScalarHistory(kind) for signal, kind in kinds.items() for h in range(heads)}
    step, compared = 0, 0
    while step < 2400:
        since, step = step, step + int(rng.integers(1, 45))
        rows = rng.integers(1, 9, heads).astype(np.float64)
        values = random_sample(rng, heads, unknown=unknown)
        with np.errstate(invalid="ignore"):  # as the detectors call it: the mean of zero rows is NaN
            pasts.add(step - since, sample(*values, rows=rows))
        for (signal, head), one in single.items():
            one.add(step, since, rows[head], float(values[signal, head]))
        found = pasts.growth(WINDOW)
        for (signal, head), one in single.items():
            expected = one.growth(WINDOW)
            assert math.isnan(found.steps) == (expected is None)
            if expected is None:
                continue
            values_found = [float(part[signal, head]) for part in (found.start, found.middle, found.end, found.error())]
            np.testing.assert_allclose((*values_found, found.steps), expected, rtol=1e-9, atol=1e-9)
            compared += 1
    assert compared > 300


def test_steps_are_weighted_by_the_last_known_learning_rate() -> None:
    pasts, one = HeadPasts.begin(1, 4000, 100), np.ones(1)
    for step in range(50, 6001, 50):
        rate = (2e-3 if step <= 4000 else 1e-3, None, 0.0)[step // 50 % 3]
        pasts.add(50, sample(one, one, learning_rate=rate))
    growth = pasts.growth(4000)
    begin = 6000 - 100 - growth.steps
    assert growth.older + growth.newer == pytest.approx(growth.steps + 4000 - begin, abs=300)


@pytest.mark.parametrize(("since", "window"), [(0, 1500), (500, 1750), (1500, 2250), (3000, 3000), (9000, 3000)])
def test_growth_window_is_half_the_run_age_limited_by_the_history(since: int, window: int) -> None:
    pasts = HeadPasts.begin(1, 4000, 10)
    for step in range(since + 10, since + 3001, 10):
        pasts.add(10, sample(np.full(1, float(step)), np.ones(1)))
    growth = pasts.growth(4000, since + 3000)
    assert (growth.held, growth.age) == (3000, since + 3000)
    assert float(growth.start[HeadSignal.OFFSET, 0]) - (since + 3000 - window) == pytest.approx(40, abs=50)


def test_rewound_history_continues_like_one_that_never_went_further() -> None:
    def filled(pasts: HeadPasts, since: int, until: int) -> HeadPasts:
        for step in range(since + 50, until + 1, 50):
            pasts.add(50, sample(np.full(2, float(step)), np.full(2, 2.0 * step), learning_rate=1e-3))
        return pasts

    straight = filled(HeadPasts.begin(2, 4000, 100), 0, 9000)
    returned = filled(HeadPasts.begin(2, 4000, 100), 0, 10_000)
    returned.set_back(1000)
    assert returned.blocks[-1].end == straight.blocks[-1].end == 9000
    found, expected = (filled(pasts, 9000, 11_000).growth(4000) for pasts in (returned, straight))
    # the rewound history has dropped its oldest blocks
    np.testing.assert_allclose(found.start[0], expected.start[0], atol=600)
    np.testing.assert_array_equal(found.end, expected.end)
    assert found.held == expected.held
    assert len(straight.blocks) == straight.most
