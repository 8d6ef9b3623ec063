"""The demo's story about its recorded runs matches the full traces, read independently."""

import re

import pytest
from tests.lab.short_traces import TRACES

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.lab.recording.replay import judged, verdicts
from foreshock.lab.recording.trace import Trace, read_trace
from foreshock.lab.shown.story import (
    LEFT_ALONE,
    NAMES,
    OF_PYTORCH,
    SWITCHED,
    Story,
    equal_until,
    opening,
    recordings,
)

RUNS = recordings()
GAP_TOLERANCE = 0.2
"""Percent: the story rounds gaps to a tenth, losses have four digits, and 500 steps start and end inside samples."""
WHOLE = {name: read_trace(TRACES / trace.header["shows"]["file"]) for name, trace in RUNS.items()}
LAST_STEP = max(trace.samples[-1].step for trace in RUNS.values())


def number(pattern: str, text: str) -> float:
    """The only number in `text` that matches the pattern."""
    (found,) = re.findall(pattern, text)
    return float(found.replace(",", ""))


def largest(trace: Trace) -> dict[int, float]:
    """The largest |score| of any head, by step."""
    found = {}
    for sample in trace.samples:
        words = sample.words()
        assert words is not None
        found[sample.step] = float(slot_values(words, Slot.ROW_MAX_ABS).max())
    return found


@pytest.fixture(scope="module")
def story_and_lines() -> tuple[Story, list[tuple[int, str, str]]]:
    """The story of all runs, and each line with its step and run."""
    story, lines = Story(), []
    events = sorted(((e, run) for run in NAMES for e in judged(RUNS[run])), key=lambda each: each[0].step)
    for event, run in events:
        lines += [(event.step, line_run, sentence) for line_run, sentence in story.hear(run, event)]
    return story, lines


def test_demo_recordings_and_their_warnings_match_the_full_traces() -> None:
    for name in NAMES:
        kinds = wire.Sample | wire.Switched
        whole = [event for event in WHOLE[name].events if isinstance(event, kinds) and event.step <= LAST_STEP]
        assert RUNS[name].events == whole
        assert verdicts(RUNS[name]) == [v for v in verdicts(WHOLE[name]) if v.step <= LAST_STEP]
    assert sum(file.stat().st_size for file in (TRACES.parent / "shown").glob("*.gz")) < 210_000


def test_twins_are_equal_until_the_switch_and_the_opening_states_the_step() -> None:
    left_alone, switched = WHOLE[LEFT_ALONE].steps, WHOLE[SWITCHED].steps
    both = min(len(left_alone.loss), len(switched.loss))
    first_other = int(left_alone.step[:both][left_alone.loss[:both] != switched.loss[:both]][0])
    until = equal_until(RUNS[LEFT_ALONE], RUNS[SWITCHED])
    (at,) = [event.step for event in RUNS[SWITCHED].events if isinstance(event, wire.Switched)]
    assert until <= at < first_other
    assert [RUNS[name].header["seed"] for name in (LEFT_ALONE, SWITCHED)] == [RUNS[SWITCHED].header["seed"]] * 2
    assert number(r"up to step ([\d,]+)", dict(opening(RUNS))[SWITCHED]) == until
    assert equal_until(RUNS[LEFT_ALONE], RUNS[OF_PYTORCH]) == 0


def test_opening_is_correct_about_switches_and_kernels() -> None:
    lines = dict(opening(RUNS))
    for name in (LEFT_ALONE, OF_PYTORCH):
        assert not [event for event in WHOLE[name].events if isinstance(event, wire.Switched)]
    assert {trace.header["nature"] for trace in WHOLE.values()} == {"natural"}
    assert {layer.served_by for layer in WHOLE[LEFT_ALONE].started.layers} == {"kernel"}
    assert WHOLE[OF_PYTORCH].header["backend"] == "flash"
    assert lines[OF_PYTORCH].startswith("PyTorch's own flash kernel, of which a sample of rows is measured")


def test_warning_precedes_the_switch_and_the_switch_a_score_of_512(
    story_and_lines: tuple[Story, list[tuple[int, str, str]]],
) -> None:
    story, lines = story_and_lines
    first = {
        run: next(step for step, line_run, text in lines if line_run == run and text.startswith("warning: "))
        for run in NAMES
    }
    (switched,) = [
        step for step, line_run, text in lines if line_run == SWITCHED and "its agent switches 16 heads" in text
    ]
    assert first[SWITCHED] == first[LEFT_ALONE] <= switched < story.dangerous[LEFT_ALONE]
    assert (first[SWITCHED], SWITCHED, "warning: the same as of its twin.") in lines
    assert SWITCHED not in story.dangerous
    for run in (LEFT_ALONE, OF_PYTORCH):
        scores = largest(RUNS[run])
        assert (story.dangerous[run], run, "its largest score reaches 512.") in lines
        assert max(score for step, score in scores.items() if step < story.dangerous[run]) < 512


def test_ending_matches_the_recorded_steps_and_scores(
    story_and_lines: tuple[Story, list[tuple[int, str, str]]],
) -> None:
    story, _ = story_and_lines
    left_alone, of_pytorch, switched = story.ending()
    for run, sentence in ((LEFT_ALONE, left_alone), (OF_PYTORCH, of_pytorch)):
        first = next(v for v in verdicts(RUNS[run]) if v.state == "raised")
        assert sentence.startswith(
            f"{run} was warned about at step {first.step:,}: layer {first.layer} head {first.head}"
        )
        assert number(r"([\d,]+) steps later", sentence) == story.dangerous[run] - first.step
        assert number(r"at the end it is ([\d,]+)", sentence) == round(largest(RUNS[run])[RUNS[run].samples[-1].step])
    at = number(r"at step ([\d,]+); since", switched)
    since = max(score for step, score in largest(RUNS[SWITCHED]).items() if step > at)
    assert number(r"was larger than ([\d,]+)", switched) == pytest.approx(since, abs=1)
    end = number(r"up to ([\d,]+) was", switched)
    means = [
        WHOLE[name].steps.loss[(WHOLE[name].steps.step > end - 500) & (WHOLE[name].steps.step <= end)].mean()
        for name in (LEFT_ALONE, SWITCHED)
    ]
    gap = number(r"was ([\d.]+)% above it", switched)
    assert gap == pytest.approx(float(100 * (means[0] / means[1] - 1)), abs=GAP_TOLERANCE)
    assert gap > 1


def test_run_without_a_warning_is_described_without_one() -> None:
    story = Story()
    for run in NAMES:
        for event in judged(RUNS[run]):
            if event.step <= 1000:
                assert not list(story.hear(run, event))
    assert list(story.ending()) == [f"{LEFT_ALONE} was not warned about.", f"{OF_PYTORCH} was not warned about."]
