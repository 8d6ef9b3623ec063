"""The conditions of a warning, each beside what its sentence in docs/detectors.md says, head by head."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.growth import Growth, HeadPasts, HeadSignal
from foreshock.monitor.detect.rule import WarningConditions
from foreshock.monitor.detect.thresholds import DetectorConfig

STEP = 6000
"""Past `settle_steps`: no more is asked for than of a settled run."""


QUIET = [1.0] * 6
"""Heads of other layers, which do not grow."""


def grown(offsets: Floats, scores: Floats) -> Growth:
    """What the last 3000 steps of a run look like whose offsets and scores went evenly from 1 to these."""
    heads = len(offsets)
    pasts = HeadPasts.begin(heads, 4000, 100)
    for step in range(3000, STEP + 1, 25):
        share = (step - 3000) / (STEP - 3000)
        noise = 0.001 * math.sin(step)  # a block's standard error must not be nothing
        offset, score = (1 + share * (reached - 1) + noise for reached in (offsets, scores))
        with np.errstate(invalid="ignore"):
            pasts.add(step, step - 25, np.full(heads, 100.0), offset, score)
    growth = pasts.growth(3000)
    assert growth is not None
    return growth


def ratios(
    offsets: Floats, scores: Floats, bias_z: Floats, *, past_warmup: bool = True, **settings: float | None
) -> Floats:
    config, growth = DetectorConfig.model_validate({"horizon_run_multiple": None} | settings), grown(offsets, scores)
    with np.errstate(divide="ignore", invalid="ignore"):
        return WarningConditions.of(growth, bias_z, config, past_warmup=past_warmup).ratios


@pytest.mark.parametrize("heads", [1, 8, 144, 5120])
def test_noise_alone_supports_a_head_of_the_model_in_one_case_of_twenty(heads: int) -> None:
    limit = DetectorConfig().support_z(heads)
    assert heads * (1 - NormalDist().cdf(limit)) == pytest.approx(DetectorConfig().support_chance)
    draws = np.random.default_rng(heads).standard_normal((2000, heads)).max(axis=1)
    assert (draws >= limit).mean() == pytest.approx(DetectorConfig().support_chance, abs=0.015)


def test_a_drift_without_support_comes_half_the_way_and_its_score_says_the_rest() -> None:
    offsets, bias_z = np.array([40.0, 40.0, 100.0, 100.0, *QUIET]), np.array([9.0, 0.0, 0.0, 0.0, *QUIET])
    found = ratios(offsets, np.array([20.0, 20.0, 300.0, 200.0, *QUIET]), bias_z)
    assert found[HeadSignal.OFFSET, 0] >= 1 > found[HeadSignal.OFFSET, 1] == 0.5
    assert found[HeadSignal.SCORE, 2] >= 1 > found[HeadSignal.SCORE, 3]


@pytest.mark.parametrize("part", [0.25, 0.5])
def test_a_head_whose_scores_spread_is_no_drift_and_warns_only_when_its_score_is_dangerous(
    part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of healthy models sharpen: the largest score grows, and the mean hardly. A shift moves both."""
    scores = np.array([300.0, 300.0, 300.0, 300.0, 500.0, 600.0, *[1.0] * 7])
    shares = np.array([1.1 * part, 0.9 * part, 1.1 * part, 0.9 * part, 0.1, 0.1, *[0.0] * 7])
    bias_z = np.array([9.0, 9.0, 0.0, 0.0, 9.0, 0.0, *[0.0] * 7])
    monkeypatch.setattr(DetectorConfig, "shared_part", part)
    found = ratios(1 + shares * (scores - 1), scores, bias_z)
    assert np.flatnonzero(found[HeadSignal.OFFSET] >= 1).tolist() == [0]
    assert np.flatnonzero(found[HeadSignal.SCORE] >= 1).tolist() == [0, 2, 5]


def test_what_is_not_known_of_the_scores_leaves_a_supported_drift_a_drift() -> None:
    found = ratios(np.array([40.0, 1.0]), np.full(2, np.nan), np.array([9.0, 0.0]))
    assert found[HeadSignal.OFFSET, 0] >= 1


def test_a_bias_of_the_other_sign_supports_nothing() -> None:
    offsets = np.array([-40.0, 40.0, 1.0, 1.0])
    found = ratios(offsets, np.full(4, 20.0), np.array([9.0, -9.0, 9.0, 9.0]))
    assert found[HeadSignal.OFFSET].max() == 0.5


def test_neither_offset_nor_score_is_nearer_than_its_harm_within_the_horizon() -> None:
    offsets, scores, bias_z = np.array([12.0, 1.0]), np.array([14.0, 5.0]), np.array([9.0, 0.0])
    however_far, within = (ratios(offsets, scores, bias_z, horizon_run_multiple=lives) for lives in (None, 3.0))
    assert however_far[HeadSignal.OFFSET, 0] >= 1 > within[HeadSignal.OFFSET, 0]
    by_hand = 3.0 * STEP / ((512 - 14) / (11 / 3000))  # it grows by 11 nats in 3000 steps, evenly
    assert within[HeadSignal.OFFSET, 0] == pytest.approx(by_hand, rel=0.2)


@pytest.mark.parametrize("fourth", [300.0, 255.0, math.nan])
def test_before_growth_is_judged_no_head_is_near_but_for_a_dangerous_score_whatever_the_others_do(
    fourth: float,
) -> None:
    offsets, scores = np.array([60.0, -40.0, 20.0, 30.0]), np.array([100.0, 255.0, 90.0, fourth])
    found = ratios(offsets, scores, np.full(4, 9.0), past_warmup=False)
    assert (found[HeadSignal.SCORE, 3] > 0) == (fourth >= 256)
    found[HeadSignal.SCORE, 3] = 0.0
    np.testing.assert_array_equal(found, 0.0)
