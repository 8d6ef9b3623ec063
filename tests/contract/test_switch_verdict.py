"""Whether a switch stopped a head's growth, tested at the limits."""

import math

import pytest

from foreshock.contract.switch_verdict import SignalGrowth, growth_of


@pytest.mark.parametrize(
    ("before", "after", "arrested"),
    [
        (0.9, 0.29, True),
        (0.9, 0.31, False),
        (0.1, 0.03, True),  # 0.1 counts as growth before a switch, so at most a third of it may remain
        (0.1, 0.05, False),
        (0.09, 0.09, True),
        (0.0, 0.1, False),
        (-0.5, -0.5, True),
    ],
)
def test_growth_is_arrested_if_at_most_a_third_remains_or_it_is_below_its_level(
    before: float, after: float, arrested: bool
) -> None:
    assert SignalGrowth("score offset", before, after).arrested is arrested
    assert SignalGrowth("score offset", before, after, above=False).arrested


def test_growth_needs_six_finite_values_of_any_sign_before_and_after() -> None:
    before, after = [-1.0, None, -1.0, math.nan, -2.0, -2.0, -4.0, -4.0], [4.0] * 6
    found = growth_of("head.score_offset", before, after)
    assert found is not None
    assert found.before == pytest.approx(math.log(4))
    assert (found.after, found.above) == (0.0, True)
    assert growth_of("head.score_offset", before[:-1], after) is None
    assert growth_of("head.score_offset", before, after[:5]) is None
