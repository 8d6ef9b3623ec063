"""What must not matter to the detectors: the order of heads, units, how long a sample is, a stop in between."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.monitor.courses import EVERY, HEADS, Course, N, explosion, healthy, line, play, raised, reading

from foreshock.contract import wire
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.detectors import Detectors


@settings(max_examples=4, deadline=None)
@given(order=st.permutations(range(N)))
def test_the_order_of_the_heads_does_not_matter(order: list[int]) -> None:
    def shuffled(step: int) -> tuple[Floats, Floats]:
        offset, score = explosion(step)
        return offset[order], score[order]

    straight, expected = play(explosion, until=4500, delta_bias_sum=np.zeros(N))
    turned, told = play(
        shuffled, until=4500, delta_bias_sum=np.zeros(N), detectors=Detectors([HEADS[i] for i in order])
    )
    assert told == expected
    np.testing.assert_allclose(turned.risk, straight.risk[order], rtol=1e-12)


@settings(max_examples=4, deadline=None)
@given(exponent=st.integers(-20, 20))
def test_the_unit_of_the_delta_bias_does_not_matter(exponent: int) -> None:
    scale = 2.0**exponent
    expected: list[wire.Verdict] = []
    told: list[wire.Verdict] = []
    straight, scaled = Detectors(HEADS), Detectors(HEADS)
    for step in range(EVERY, 4501, EVERY):
        sample = reading(step, line, bias=0.6)
        expected += straight.update(sample)
        told += scaled.update(reading(step, line, delta_bias_sum=sample.delta_bias_sum * scale))
    assert raised(expected)
    assert told == expected


def test_the_length_of_a_sample_moves_a_warning_by_little() -> None:
    steps = []
    for every in (10, 50, 90):
        detectors = Detectors(HEADS)
        warned = None
        for step in range(every, 6000, every):
            if detectors.update(reading(step, line, since_step=step - every, bias=4.0)):
                warned = warned or step
        steps.append(warned)
    assert None not in steps
    assert max(s for s in steps if s) - min(s for s in steps if s) <= 600


@settings(max_examples=4, deadline=None)
@given(course=st.sampled_from([healthy, line, explosion]), shift=st.integers(1, 90))
def test_a_mirrored_run_of_layers_numbered_otherwise_is_judged_alike(course: Course, shift: int) -> None:
    def mirrored(step: int) -> tuple[Floats, Floats]:
        offset, score = course(step)
        return -offset, score

    _, expected = play(course, until=5000, bias=0.6)
    moved = Detectors([(layer + shift, head) for layer, head in HEADS])
    told: list[wire.Verdict] = []
    for step in range(EVERY, 5001, EVERY):
        straight = reading(step, course, bias=0.6)
        told += moved.update(reading(step, mirrored, delta_bias_sum=-straight.delta_bias_sum))
    assert [(v.step, v.state, v.layer, v.head, v.cause, v.signal, v.forecast_steps) for v in told] == [
        (v.step, v.state, (v.layer or 0) + shift, v.head, v.cause, v.signal, v.forecast_steps) for v in expected
    ]
