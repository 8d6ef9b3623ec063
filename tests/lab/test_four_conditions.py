"""The rule of four conditions warns about heads that drift by their bias, and about no others."""

from pathlib import Path

import numpy as np
import pytest
from tests.lab.made_up import record

from foreshock.lab.recording.trace import read_trace
from foreshock.lab.scoring.four_conditions import FIRST_STEP, FourConditions, followed
from foreshock.monitor.detect.readings import Readings

HEADS = 3


def course(offset: list[float], bias: float, scores: float = 5.0) -> tuple[int | None, np.ndarray]:
    """The first step at which head 1 of HEADS is warned about, and the last shares; the other heads stand still."""
    rule, first, shares = FourConditions(HEADS), None, np.zeros(HEADS)
    noise = np.random.default_rng(0)
    for block, value in enumerate(offset, start=1):
        offsets = np.array([0.1, value, -0.1])
        reading = Readings(
            step=100 * block,
            since_step=100 * (block - 1),
            rows=np.full(HEADS, 1000.0),
            score_offset=offsets,
            largest_score=scores + np.abs(offsets),
            delta_bias_sum=np.array([0.0, bias, 0.0]) + noise.normal(0, 0.2, HEADS),
            nonfinite_rows=np.zeros(HEADS),
            modes=np.zeros(HEADS, dtype=np.int32),
        )
        shares = rule.update(reading)
        if first is None and shares[1] >= 1:
            first = reading.step
    return first, shares


def test_a_head_that_compounds_the_way_its_bias_pushes_is_warned_about_and_no_other() -> None:
    first, shares = course([0.5 * 1.06**block for block in range(80)], bias=1.0)
    assert first is not None
    assert first >= FIRST_STEP
    assert shares.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("offset", "bias"),
    [
        ([0.5 * 1.06**block for block in range(80)], 0.0),  # pushed by nothing
        ([0.5 * 1.06**block for block in range(80)], -1.0),  # pushed back
        ([min(0.2 * block, 8.0) for block in range(80)], 1.0),  # it settled
        ([0.05 * block for block in range(80)], 1.0),  # harm is lives away
    ],
)
def test_each_condition_alone_keeps_it_quiet(offset: list[float], bias: float) -> None:
    assert course(offset, bias)[0] is None


def test_a_score_past_1024_is_warned_about_whatever_moves_it() -> None:
    assert course([0.0] * 20, bias=0.0, scores=2000.0)[0] is not None


def test_it_follows_a_recorded_run_to_its_failure(tmp_path: Path) -> None:
    fails = [
        step for step, shares in followed(read_trace(record(tmp_path / "f.jsonl.gz", fails=True))) if shares.max() >= 1
    ]
    assert fails
    quiet = read_trace(record(tmp_path / "h.jsonl.gz", fails=False))
    assert not [step for step, shares in followed(quiet) if shares.max() >= 1]
