"""What people watch today, as signals over a run."""

import math
from pathlib import Path

import numpy as np
from tests.lab.made_up import noisy

from foreshock.lab.recording.trace import Steps, read_trace
from foreshock.lab.scoring.baselines import BASELINES

TRACES = Path(__file__).parents[2] / "src/foreshock/lab" / "traces"


def test_a_z_score_sees_a_spike_and_does_not_let_it_hide_the_next() -> None:
    loss = noisy(2.0, 900)
    loss[[100, 600, 610]] += 1.0
    made = Steps(np.arange(1, 901), loss, np.full(900, math.nan), np.ones(900, dtype=np.int64))
    found = {each.name: each for each in BASELINES}["loss z-score"]
    trace = read_trace(TRACES / "key-bias_fp32_batch32.trace.xz")
    signal = found.signal(type(trace)(trace.path, {}, trace.started, [], made))
    assert signal is not None
    assert set(signal.step[signal.value > 10].tolist()) == {601, 611}
    assert {each.name: each for each in BASELINES}["gradient-norm z-score"].signal(
        type(trace)(trace.path, {}, trace.started, [], made)
    ) is None
