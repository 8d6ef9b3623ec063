"""Synthetic runs and the rows of their score table."""

import itertools

import numpy as np

from foreshock.lab.scoring.synthetic import (
    FAMILIES,
    SCORING_SEED,
    play,
    score_family,
    score_synthetic,
    supported_by_noise,
)

NAMED = {family.name: family for family in FAMILIES}


def test_synthetic_runs_depend_only_on_the_seed_and_only_failing_ones_reach_512() -> None:
    assert len(NAMED) == len(FAMILIES)
    for family in FAMILIES:
        first, again, other = (family.make(np.random.default_rng(seed)) for seed in (3, 3, 4))
        np.testing.assert_array_equal(first.score, again.score, family.name)
        assert not np.array_equal(first.score, other.score), family.name
        assert len(first.step) == len(first.offset) == len(first.score) == len(first.bias)
        assert (np.nanmax(first.score) >= 512) == (family.truth == "failing"), family.name


def test_table_row_has_leads_of_failing_runs_and_false_heads_of_healthy_ones() -> None:
    failing, healthy = NAMED["one head"], NAMED["flat, push 0, constant"]
    rows = list(score_synthetic((failing, healthy), runs=1))
    assert [(row.family, row.runs) for row in rows[:2]] == [(failing.name, 1), (healthy.name, 1)]
    lead = rows[0].median_lead
    assert lead is not None
    assert (rows[0].least_lead, rows[0].warned, rows[0].as_rounding) == (lead, lead > 0, 1)
    assert (rows[1].warned, rows[1].false_heads, rows[1].median_lead) == (0, 0, None)
    assert rows[2].runs == 1


def test_scoring_and_tuning_use_different_seeds() -> None:
    family = NAMED["one head"]
    assert score_family(family, runs=1) == score_family(family, first_seed=SCORING_SEED, runs=1)
    assert score_family(family, first_seed=0, runs=1) != score_family(family, runs=1)


def test_noise_tested_after_every_block_rarely_supports_a_drift() -> None:
    row = supported_by_noise(16, runs=20, blocks=200, first_seed=0)
    assert row.warned <= 3
    assert row.runs == 20


def test_closer_samples_name_the_cause_of_a_drift_that_sparse_samples_miss() -> None:
    family = NAMED["doubles each 500 steps from 5,000, closer samples decide"]
    named = dict.fromkeys((0, 200), 0)
    for seed, close_steps in itertools.product(range(3), named):
        course = family.make(np.random.default_rng(seed))
        end = int((course.score[:, 0] >= 512).argmax()) - 1000
        played = play(course, end, family.stride, close_steps)
        named[close_steps] += any(verdict.cause == "rounding" for _, verdicts in played for verdict in verdicts)
    assert named[0] < named[200] == 3
