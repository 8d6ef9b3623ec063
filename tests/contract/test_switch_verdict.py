"""Whether a switch stopped a head's growth, at its bounds."""

import math

import pytest

from foreshock.contract.switch_verdict import SignalGrowth, growth_of


@pytest.mark.parametrize(
    ("before", "after", "arrested"),
    [
        (0.9, 0.29, True),
        (0.9, 0.31, False),
        (0.1, 0.03, True),  # a tenth is growth before a switch, so that a third of it is growth after it
        (0.1, 0.05, False),
        (0.09, 0.09, True),
        (0.0, 0.1, False),
        (-0.5, -0.5, True),
    ],
)
def test_an_arrested_signal_keeps_a_third_of_its_growth_at_most_and_below_its_level_none_counts(
    before: float, after: float, arrested: bool
) -> None:
    assert SignalGrowth("score offset", before, after).arrested is arrested
    assert SignalGrowth("score offset", before, after, above=False).arrested


def test_growth_is_told_of_six_numbers_or_more_on_both_sides_whatever_their_sign() -> None:
    before, after = [-1.0, None, -1.0, math.nan, -2.0, -2.0, -4.0, -4.0], [4.0] * 6
    found = growth_of("head.score_offset", before, after)
    assert found is not None
    assert found.before == pytest.approx(math.log(4))
    assert (found.after, found.above) == (0.0, True)
    assert growth_of("head.score_offset", before[:-1], after) is None
    assert growth_of("head.score_offset", before, after[:5]) is None
