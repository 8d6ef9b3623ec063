"""What people watch today, as signals over a run: spikes by their definitions."""

import math
from pathlib import Path

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from tests.lab.made_up import noisy

from foreshock.contract import wire
from foreshock.lab.recording.trace import Steps, Trace, read_trace
from foreshock.lab.scoring.baselines import BASELINES


def test_a_z_score_sees_a_spike_and_does_not_let_it_hide_the_next() -> None:
    loss = noisy(2.0, 500)
    loss[[200, 210]] += 1.0
    made = Steps(np.arange(1, 501), loss, np.full(500, math.nan), np.ones(500, dtype=np.int64))
    found = {each.name: each for each in BASELINES}["loss z-score"]
    trace = read_trace(TRACES / "key-bias_fp32_batch32.trace.xz")
    signal = found.signal(type(trace)(trace.path, {}, trace.started, [], made, []))
    assert signal is not None
    assert set(signal.step[signal.value > 10].tolist()) == {201, 211}
    assert {each.name: each for each in BASELINES}["gradient-norm z-score"].signal(
        type(trace)(trace.path, {}, trace.started, [], made, [])
    ) is None


TRACES = Path(__file__).parents[2] / "lab" / "traces"


@given(
    st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 9.0, math.inf, math.nan]), min_size=12, max_size=60),
    st.integers(0, 2**31),
)
@example([0.5, *[math.inf] * 10, 0.5], 0)
def test_the_loss_spikes_of_other_tools_equal_their_definition_step_by_step(drawn: list[float], seed: int) -> None:
    loss = np.concatenate((np.random.default_rng(seed).uniform(1, 3, 110), drawn))
    made = Steps(np.arange(1, len(loss) + 1), loss, np.full(len(loss), math.nan), np.ones(len(loss), dtype=np.int64))
    run = Trace(
        Path("made-up"),
        {},
        wire.Started(step=0, unix_seconds=0.0, layers=(), policy="observe", numerics="kernel"),
        [],
        made,
        [],
    )
    for name, window, in_a_row in (("Lightning", 10, 1), ("llm-foundry", 100, 5)):
        signal = {each.name: each for each in BASELINES}[f"loss spike of {name}"].signal(run)
        assert signal is not None
        expected = {}
        for last in range(window + in_a_row - 1, len(loss)):
            ratios = []
            for place in range(last - in_a_row + 1, last + 1):
                past = [x for x in loss[place - window : place] if math.isfinite(x)]
                before = sum(past) / len(past) if past else math.nan
                ratios.append(loss[place] / before if math.isfinite(loss[place]) else math.inf)
            expected[last + 1] = float(np.min(ratios))  # unknown where one is
        assert signal.step.tolist() == list(expected)
        np.testing.assert_allclose(signal.value, list(expected.values()), rtol=1e-9)
