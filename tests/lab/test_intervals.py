"""Intervals against tables, against brute force, and as laws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.lab.scoring.intervals import over_runs, poisson_upper_bound, share_interval


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [
        (0, 10, 0.0, 0.3085),
        (10, 10, 0.6915, 1.0),
        (5, 10, 0.1871, 0.8129),
        (1, 3, 0.0084, 0.9057),
        (9, 12, 0.4281, 0.9451),
    ],
)
def test_the_interval_of_a_share_is_that_of_the_tables(right: int, of: int, low: float, high: float) -> None:
    assert share_interval(right, of) == pytest.approx((low, high), abs=2e-4)


@given(st.integers(1, 40).flatmap(lambda of: st.tuples(st.integers(0, of), st.just(of))))
def test_the_ends_of_a_share_are_where_the_count_becomes_unlikely(counts: tuple[int, int]) -> None:
    right, of = counts
    interval = share_interval(right, of)
    assert interval is not None
    low, high = interval
    assert 0 <= low <= right / of <= high <= 1

    def chance(share: float, first: int, last: int) -> float:
        return sum(math.comb(of, k) * share**k * (1 - share) ** (of - k) for k in range(first, last + 1))

    if right:
        assert chance(low, right, of) == pytest.approx(0.025, abs=1e-6)
    if right < of:
        assert chance(high, 0, right) == pytest.approx(0.025, abs=1e-6)


def test_nothing_has_no_share_and_a_count_beyond_the_whole_is_refused() -> None:
    assert share_interval(0, 0) is None
    with pytest.raises(ValueError, match="4 of 3 is no share"):
        share_interval(4, 3)


@given(st.integers(0, 30))
def test_the_bound_of_a_count_is_where_so_few_become_unlikely(count: int) -> None:
    mean = poisson_upper_bound(count)
    assert sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(count + 1)) == pytest.approx(0.05, abs=1e-6)


@given(st.lists(st.integers(-5000, 9000), min_size=2, max_size=20))
def test_an_interval_over_runs_lies_within_the_runs_and_repeats(leads: list[int]) -> None:
    found = over_runs(leads)
    assert found == over_runs(leads)
    assert found is not None
    assert min(leads) <= found[0] <= found[1] <= max(leads)


def test_an_interval_over_many_runs_holds_the_median_as_often_as_it_says() -> None:
    source = np.random.default_rng(5)
    inside = 0
    for _ in range(60):
        low, high = over_runs(source.normal(3.0, 1.0, size=25).tolist()) or (0, 0)
        inside += low <= 3.0 <= high
    assert 50 <= inside <= 60


def test_one_run_says_nothing_of_how_runs_differ() -> None:
    assert over_runs([4.0]) is None
