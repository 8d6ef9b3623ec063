"""Synthetic heads whose outcome is known, and a function that runs the detectors on them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from foreshock.contract import wire
from foreshock.contract.modes import Mode
from foreshock.contract.slots import Floats
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors
from foreshock.monitor.detect.readings import Readings

HEADS = [(layer, head) for layer in range(4) for head in range(4)]
N = len(HEADS)
FAILING = 2
"""Row of the head that fails: layer 0 head 2."""
INTERVAL = 50
NO_HORIZON = DetectorConfig(horizon_windows=None)
"""Warns about a drift however far in the future its harm is, so that slow drifts test the other conditions."""
Course = Callable[[int], tuple[Floats, Floats]]
"""Offsets and largest scores, [N], at a step."""


@cache
def noise(step: int) -> Floats:
    return np.random.default_rng(step).normal(0.0, 1.0, N)


def healthy(step: int) -> tuple[Floats, Floats]:
    """Each head grows fast at first, then settles at its own level."""
    level = np.linspace(-6.0, 24.0, N)
    offset = level * (1 - np.exp(-step / 900)) + 0.05 * noise(step)
    return offset, 12 + 25 * (1 - np.exp(-step / 700)) + 1.5 * np.abs(noise(step + 1))


def slow_drift(step: int) -> tuple[Floats, Floats]:
    """One head drifts 1.5 nats per thousand steps after step 2000: 512 is hundreds of thousands of steps away."""
    offset, score = healthy(step)
    offset[FAILING] = 0.3 + 1.5e-3 * max(0, step - 2000) + 0.05 * noise(step)[FAILING]
    return offset, score


def linear_drift(step: int) -> tuple[Floats, Floats]:
    """One head's offset and largest score drift 40 nats per thousand steps after step 2000."""
    offset, score = healthy(step)
    drift = 0.04 * max(0, step - 2000)
    offset[FAILING] = 0.3 + drift + 0.05 * noise(step)[FAILING]
    score[FAILING] += drift
    return offset, score


def explosion(step: int) -> tuple[Floats, Floats]:
    """One head's offset doubles every 800 steps after step 2000."""
    offset, score = healthy(step)
    drift = 0.5 * 2 ** (max(0, step - 2000) / 800)
    offset[FAILING] = drift + 0.02 * noise(step)[FAILING]
    score[FAILING] = 9 + 1.25 * drift
    return offset, score


def reading(
    step: int, course: Course = healthy, *, bias: float = 0.0, mode: Mode = Mode.PLAIN, **fields: Any
) -> Readings:
    offset, score = course(step)

    delta = 1e-4 * noise(step + 2)
    delta[FAILING] += bias * 1e-4
    defaults: dict[str, Any] = {
        "step": step,
        "since_step": step - INTERVAL,
        "rows": np.full(N, 1e5),
        "score_offset": offset,
        "largest_score": score,
        "delta_bias_sum": delta,
        "nonfinite_rows": np.zeros(N),
        "modes": np.full(N, int(mode), dtype=np.int32),
        "loss": 2.0,
        "grad_norm": 1.0,
    }
    return Readings(**(defaults | fields))


def play(
    course: Course = healthy, until: int = 7000, detectors: Detectors | None = None, since: int = 0, **fields: Any
) -> tuple[Detectors, list[wire.Verdict]]:
    detectors = detectors or Detectors(HEADS)
    verdicts = []
    for step in range(since + INTERVAL, until + 1, INTERVAL):
        verdicts += detectors.update(reading(step, course, **fields))
    return detectors, verdicts


def raised(verdicts: list[wire.Verdict]) -> list[tuple[int | None, int | None]]:
    return [(v.layer, v.head) for v in verdicts if v.state == "raised"]
