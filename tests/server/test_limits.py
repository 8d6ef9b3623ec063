"""Nobody takes more than a share, whoever waits as told gets through, and what has ended is counted no more."""

from collections.abc import Sequence
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from foreshock.server import limits
from foreshock.server.limits import Buckets, ConcurrencyLimit, length_of, retry_after
from foreshock.server.problems import ProblemError

EIGHTHS = st.integers(0, 80).map(lambda n: n / 8)
"""Seconds and rates that floating point adds without an error."""


@given(rate=st.sampled_from([0.5, 1.0, 4.0]), burst=st.integers(1, 6), pauses=st.lists(EIGHTHS, max_size=40))
def test_in_no_span_of_time_is_more_taken_than_a_burst_and_what_flowed_in_since(
    rate: float, burst: int, pauses: Sequence[float]
) -> None:
    buckets, now, taken = Buckets(rate, burst), 0.0, []
    for pause in pauses:
        now += pause
        if buckets.take("a", now) == 0:
            taken.append(now)
    for first, begun in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + rate * (taken[last] - begun)


@given(rate=st.sampled_from([0.5, 1.0, 4.0]), burst=st.integers(1, 6), pauses=st.lists(EIGHTHS, max_size=40))
def test_who_waits_as_long_as_told_gets_one_and_who_waits_less_gets_none(
    rate: float, burst: int, pauses: Sequence[float]
) -> None:
    buckets, now = Buckets(rate, burst), 0.0
    for pause in pauses:
        now += pause
        if wait := buckets.take("a", now):
            assert buckets.take("a", now + wait / 2) > 0
            assert buckets.take("a", now + wait) == 0
            now += wait


def test_callers_have_buckets_of_their_own_of_which_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_MAX_BUCKETS", 3)
    buckets = Buckets(1.0, 1)
    assert [buckets.take(who, 0.0) for who in "abab"] == [0, 0, 1, 1]
    assert [buckets.take(who, 0.0) for who in "cdba"] == [0, 0, 1, 0]


@given(seconds=st.floats(0, 1000))
def test_clients_are_told_to_come_back_no_sooner_than_asked_and_within_twice_the_time(seconds: float) -> None:
    told = int(retry_after(seconds)["retry-after"])
    assert max(1, seconds) <= told <= max(1, 2 * seconds + 1)


@pytest.mark.parametrize(
    ("said", "length"),
    [("0", 0), ("12", 12), ("", 0), ("-5", 0), ("1e3", 0), ("\u00b2", 0), ("9" * 15, 10**15 - 1), ("9" * 16, 0)],
)
def test_a_length_is_read_where_it_is_a_plain_number_of_a_sane_size(said: str, length: int) -> None:
    assert length_of(Headers({"content-length": said})) == length


def body(size: int) -> Headers:
    return Headers({"content-length": str(size)})


@pytest.mark.promise("S19")
def test_a_body_that_announces_no_length_counts_as_the_largest() -> None:
    shares = ConcurrencyLimit(24, body_bytes=100, max_bytes=80)
    with shares.take("a", Headers({"transfer-encoding": "chunked"}), known=True):
        with shares.take("a", body(20), known=True):
            pass
        with pytest.raises(ProblemError), shares.take("a", body(21), known=True):
            pass


@pytest.mark.promise("S19")
@given(
    callers=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 120), st.booleans()), max_size=30),
    requests=st.integers(1, 24),
    most=st.sampled_from([50, 100]),
)
def test_whatever_is_refused_or_ends_leaves_every_caller_its_whole_share(
    callers: list[tuple[str, int, bool]], requests: int, most: int
) -> None:
    shares = ConcurrencyLimit(requests, body_bytes=most, max_bytes=80)
    with ExitStack() as under_way:
        held: dict[str, list[int]] = {}
        for who, size, known in callers:
            mine, counted = held.setdefault(who if known else "strangers", []), min(size, 80)
            full = len(mine) >= max(1, requests // (2 if known else 4))
            fits = not full and not (counted and sum(mine) and sum(mine) + counted > most)
            try:
                under_way.enter_context(shares.take(who, body(size), known=known))
                mine.append(counted)
                refused = None
            except ProblemError as error:
                refused = error.status_code
            assert refused == (None if fits else 429)
    for known in (True, False):
        with shares.take("a", body(120), known=known):
            pass
