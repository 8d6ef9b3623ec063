"""When samples are taken: at multiples of a number of steps, so that ranks sample the same steps without talking."""

import itertools
import time
from typing import Any

import pytest
from tests.monitor.doubles import Listener
from tests.monitor.tiny_models import tiny_gpt

from foreshock.contract import wire
from foreshock.monitor import attach


def sampled_steps(monkeypatch: pytest.MonkeyPatch, step_seconds: list[float], **settings: Any) -> list[int]:
    """The steps at which samples end, for steps that take so long."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with attach(tiny_gpt(), quiet=True, strict=True, url=None, norms_every_steps=0, **settings) as agent:
        listener = Listener()
        agent.subscribe(listener)
        for seconds in step_seconds:
            clock[0] += seconds
            agent.step(1.0)
    monkeypatch.undo()
    return [sample.step for sample in listener.of(wire.Sample)]


def test_slow_steps_are_sampled_at_multiples_of_the_steps_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled_steps(monkeypatch, [0.5] * 35) == [1, 10, 20, 30, 35]
    assert sampled_steps(monkeypatch, [1e-3] * 7, sample_every_steps=3, sample_every_seconds=0.0) == [1, 3, 6, 7]


def test_quick_steps_are_sampled_no_more_often_than_the_seconds_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = sampled_steps(monkeypatch, [0.009] * 500)  # 111 steps a second
    assert steps == [1, 160, 320, 480, 500]


@pytest.mark.parametrize("skew", [1.0, 1.02, 0.98])
def test_ranks_whose_clocks_differ_sample_the_same_steps(skew: float, monkeypatch: pytest.MonkeyPatch) -> None:
    jitter = itertools.cycle([0.9, 1.0, 1.2, 1.0, 0.9])
    one = [0.009 * next(jitter) for _ in range(700)]
    other = [seconds * skew for seconds in reversed(one)]
    first, second = sampled_steps(monkeypatch, one), sampled_steps(monkeypatch, other)
    assert first == second
    near_the_edge = [1 / 160] * 700  # where one rank may come to half the other's stride
    many, few = (sampled_steps(monkeypatch, [s * f for s in near_the_edge]) for f in (1.001, 0.999))
    assert set(few) <= set(many)


def test_a_long_first_step_does_not_slow_the_cadence_down_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled_steps(monkeypatch, [60.0] + [0.2] * 40) == [1, 10, 20, 30, 40, 41]
