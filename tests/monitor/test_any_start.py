"""Runs that begin late, jump, return or sample seldom: judged by the past that is held."""

import pytest

from foreshock.lab.scoring.synthetic import FAMILIES, Family, score_family

NAMED = {family.name: family for family in FAMILIES}


def families(*beginnings: str) -> list[Family]:
    found = [family for name, family in NAMED.items() if name.startswith(beginnings)]
    assert len(found) >= len(beginnings)
    return found


@pytest.mark.parametrize("family", families("score doubles"), ids=lambda family: family.name)
def test_an_explosion_is_reported_by_the_block_that_shows_it_wherever_the_agent_begins(family: Family) -> None:
    row = score_family(family, first_seed=0, runs=1)
    assert row.least_lead is not None
    assert row.least_lead >= -150


@pytest.mark.parametrize(
    "family",
    families(
        "doubles each 1,000 steps from 2,000", "returns by", "one spike of 30", "gradients fall", "a sample each 500"
    ),
    ids=lambda family: family.name,
)
def test_a_drift_that_rounding_pushes_is_named_long_before_512(family: Family) -> None:
    row = score_family(family, first_seed=0, runs=3)
    assert (row.warned, row.false_heads) == (3, 0)
    assert row.as_rounding >= 2
    assert row.median_lead is not None
    assert row.median_lead >= 3000


@pytest.mark.full
def test_a_drift_that_begins_at_step_500_000_is_named_as_one_that_begins_at_2_000() -> None:
    [late] = families("doubles each 1,000 steps from 500,000")
    row = score_family(late, first_seed=0, runs=3)
    assert (row.warned, row.false_heads) == (3, 0)
    assert row.as_rounding >= 2


@pytest.mark.parametrize(
    "family",
    families("plateau, push 0.1", "data or context change, 144", "scores spread"),
    ids=lambda family: family.name,
)
def test_heads_that_settle_are_never_warned_about(family: Family) -> None:
    row = score_family(family, first_seed=0, runs=2)
    assert row.false_heads == 0
    assert row.runs == 2
