"""The verdict on a switch, checked on recorded runs."""

from pathlib import Path

from foreshock.lab.recording.trace import read_trace
from foreshock.lab.scoring.switch_verdicts import judged

TRACES = Path(__file__).parents[2] / "src/foreshock/lab" / "traces"


def test_a_recorded_switch_that_held_is_verified_for_the_warned_head_and_the_truth_agrees() -> None:
    [path] = TRACES.rglob("key-bias-small_row-corrected-after-warning_seed44.trace.xz")
    found = judged(read_trace(path))
    assert found == [], "it ends sooner than a thousand steps after the verdict"
    [path] = TRACES.rglob("key-bias-small_paper-rescued_seed208.trace.xz")
    warned = [one for one in judged(read_trace(path)) if one.warned]
    assert warned
    assert all(one.arrested and not one.grew for one in warned)
