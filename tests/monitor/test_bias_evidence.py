"""The sequential test of the delta bias, against a scalar reference, and its false positive rate."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.contract.slots import Floats
from foreshock.monitor.detect.bias_evidence import ASKED, CHANCE, MEMORY_BETS, BiasEvidence

STAKE, USUAL, FIRST, OUTLIER, MOST = 0.6, 20, 3, 3.0, 1e6


def reference_capital(biases: list[float], rows: float, sign: float) -> float:
    """The capital of the bets on one sign, in plain Python."""
    capital, usual, blocks = 1.0, 0.0, 0
    for bias in biases:
        size = bias / math.sqrt(rows)
        gain = max(-1.0, min(1.0, size / usual)) if blocks >= FIRST and usual else 0.0
        capital = min(capital * (1 + sign * STAKE * gain) * (1 - 1 / MEMORY_BETS) + 1 / MEMORY_BETS, MOST)
        if size:
            seen = min(abs(size), OUTLIER * usual) if blocks >= FIRST else abs(size)
            blocks += 1
            usual += (seen - usual) / min(blocks, USUAL)
    return capital


def bet(evidence: BiasEvidence, bias: Floats, rows: float = 1.0) -> None:
    """One bet of one sample, arrays [N]."""
    evidence.add(bias, np.full(len(bias), rows))
    evidence.close()


def evidence_of(biases: list[float], rows: float = 100.0) -> BiasEvidence:
    evidence = BiasEvidence.begin(1)
    for bias in biases:
        bet(evidence, np.array([bias]), rows)
    return evidence


@given(st.lists(st.floats(-1e6, 1e6).filter(lambda x: x == 0 or abs(x) > 1e-6), max_size=60), st.floats(1.0, 1e9))
def test_capital_equals_the_scalar_reference(biases: list[float], rows: float) -> None:
    evidence = evidence_of(biases, rows)
    assert evidence.of(np.ones(1))[0] == pytest.approx(reference_capital(biases, rows, 1.0), rel=1e-9)
    assert evidence.of(-np.ones(1))[0] == pytest.approx(reference_capital(biases, rows, -1.0), rel=1e-9)


@pytest.mark.parametrize("sizes", [(1.0,) * 12, (1.0, 2.0, 0.5, 9.0, 1.0, 1.0, 30.0, 0.1, 1.0, 2.0, 3.0, 1.0)])
def test_mean_capital_over_all_sign_sequences_is_1(sizes: tuple[float, ...]) -> None:
    """The mean over all sign sequences is 1: under noise the capital is a martingale for any block sizes."""
    signs = np.array(list(itertools.product([-1.0, 1.0], repeat=len(sizes)))).T
    evidence = BiasEvidence.begin(signs.shape[1])
    for size, sign in zip(sizes, signs, strict=True):
        bet(evidence, size * sign)
        assert evidence.capital.mean(axis=-1) == pytest.approx(np.ones((2, 2)))


@pytest.mark.parametrize("heavy", [False, True])
def test_false_positive_rate_of_noise_stays_below_chance(heavy: bool) -> None:
    rng, runs = np.random.default_rng(7), 2000
    evidence, hit = BiasEvidence.begin(runs), np.zeros(runs, dtype=bool)
    for _ in range(MEMORY_BETS):
        bet(evidence, rng.standard_t(2, runs) if heavy else rng.standard_normal(runs))
        hit |= evidence.of(np.ones(runs)) >= ASKED
    assert 0 < hit.mean() <= CHANCE


@pytest.mark.parametrize("before", [0, 300, 3000])
def test_push_is_detected_equally_fast_after_any_length_of_noise(before: int) -> None:
    rng, heads = np.random.default_rng(11), 400
    evidence = BiasEvidence.begin(heads)
    for _ in range(before):
        bet(evidence, rng.standard_normal(heads))
    found = np.full(heads, 200)
    for block in range(100):
        bet(evidence, rng.standard_normal(heads) + 0.65)
        now = evidence.of(np.ones(heads)) >= ASKED
        found[now] = np.minimum(found[now], block)
    assert np.median(found) <= 45
    assert (found <= 99).mean() >= 0.97


def test_evidence_decays_after_a_push_ends() -> None:
    rng, heads = np.random.default_rng(5), 200
    evidence = BiasEvidence.begin(heads)
    for _ in range(1000):
        bet(evidence, rng.standard_normal(heads) + 2.0)
    assert (evidence.of(np.ones(heads)) >= ASKED).all()
    for _ in range(200):
        bet(evidence, rng.standard_normal(heads))
    assert (evidence.of(np.ones(heads)) >= ASKED).mean() <= 0.05


@pytest.mark.parametrize("size", [30.0, 1e6, -1e6])
def test_outlier_is_clipped_to_the_effect_of_a_large_block(size: float) -> None:
    biases = [1.0, -1.0] * 20
    plain, spiked = (evidence_of([*biases, last]).of(np.ones(1))[0] for last in (math.copysign(3.0, size), size))
    assert spiked == pytest.approx(plain)
    later = evidence_of([*biases, size, *[1.0] * 40]).of(np.ones(1))[0]
    assert later >= ASKED


@pytest.mark.parametrize("factor", [1 / 30, 30.0])
def test_push_is_detected_while_gradients_change_scale(factor: float) -> None:
    rng, heads = np.random.default_rng(13), 200
    evidence = BiasEvidence.begin(heads)
    for block in range(160):
        scale = factor ** min(1.0, block / 30)
        bet(evidence, scale * (rng.standard_normal(heads) + 0.65 * (block >= 40)))
    assert (evidence.of(np.ones(heads)) >= ASKED).mean() >= 0.9


@pytest.mark.parametrize(
    ("push", "blocks"), [(0.9 / math.sqrt(10), 3), (0.065, 100)], ids=["within a block", "over blocks"]
)
def test_push_is_detected_from_samples_of_every_step(push: float, blocks: int) -> None:
    """Ten samples of consecutive steps suffice for the first push; the second needs whole blocks."""
    rng, heads = np.random.default_rng(17), 200
    noise, pushed = (BiasEvidence.begin(heads) for _ in range(2))
    for step in range(1, 100 * blocks + 1):
        drawn = rng.standard_normal(heads)
        for evidence, bias in ((noise, drawn), (pushed, drawn + push)):
            evidence.add(bias, np.ones(heads))
            if step % 100 == 0:
                evidence.close()
    gain, by_noise = (each.of(np.ones(heads)) >= ASKED for each in (pushed, noise))
    assert gain.mean() >= 0.8
    assert by_noise.mean() <= CHANCE


def test_capital_stays_when_blocks_get_more_samples_than_a_bet() -> None:
    evidence = evidence_of([1.0] * 20)
    gain = evidence.of(np.ones(1))[0]
    for _ in range(11):
        evidence.add(np.zeros(1), np.ones(1))
    evidence.close()
    assert evidence.of(np.ones(1))[0] == pytest.approx(gain, rel=0.01)


def test_forget_resets_the_given_heads_only() -> None:
    evidence = BiasEvidence.begin(2)
    for _ in range(20):
        bet(evidence, np.ones(2), 100.0)
    evidence.add(np.array([1e3, 0.0]), np.ones(2))  # in the open block
    evidence.forget(np.array([True, False]))
    assert evidence.of(np.ones(2))[0] == 1.0
    assert evidence.of(np.ones(2))[1] > ASKED
    for _ in range(20):
        bet(evidence, np.array([1.0, 0.0]), 100.0)
    assert evidence.of(np.ones(2))[0] == pytest.approx(evidence_of([1.0] * 20).of(np.ones(1))[0])


def test_nonfinite_bias_is_left_out_of_its_bet() -> None:
    with_gap, without = BiasEvidence.begin(1), BiasEvidence.begin(1)
    for number in range(20):
        if number % 5 == 4:
            with_gap.add(np.array([math.nan]), np.zeros(1))
        bet(with_gap, np.ones(1), 100.0)
        bet(without, np.ones(1), 100.0)
    assert with_gap.of(np.ones(1)) == without.of(np.ones(1))
