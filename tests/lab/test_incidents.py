"""Incidents of a recorded run, as people would have been told of them, and the head that fails."""

import math
from pathlib import Path
from typing import Any

import pytest
from tests.lab.made_up import HEADS, record

from foreshock.contract import wire
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.scoring.incidents import Opened, failing_head, incident_at, opened


def said(name: str, step: int, state: Any = "raised", cause: Any = "rounding", **more: Any) -> wire.Verdict:
    """About layer 0 and the head that the last letter of `name` counts."""
    fields: dict[str, Any] = {"severity": "warning", "layer": 0, "head": ord(name[-1]) - ord("a"), "signal": "offset"}
    fields |= {"evidence": {}, "sentence": "", "forecast_steps": None} | more
    for end in ("low", "high"):
        fields.setdefault(f"forecast_{end}_steps", None)
    return wire.Verdict(id=name, step=step, state=state, cause=cause, **fields)


def test_heads_of_one_cause_are_one_incident_until_all_of_them_are_quiet() -> None:
    story = [
        said("a", 100, forecast_steps=400.0),
        said("b", 150),
        said("c", 200, cause="other"),
        said("a", 300, "cleared"),
        said("d", 350),
        said("b", 400, "cleared"),
        said("d", 500, "cleared"),
        said("e", 700, forecast_steps=math.inf),
        said("note", 750, cause="other", severity="info"),
    ]
    assert opened(story) == [
        Opened(100, "rounding", 500),
        Opened(200, "other", None),
        Opened(700, "rounding", 1_000_000_700),
    ]
    assert opened([]) == []


def test_rounding_and_score_growth_that_stand_at_one_time_are_one_incident_and_one_after_the_other_are_two() -> None:
    both = [said("a", 100, cause="score growth"), said("b", 150), said("a", 200, "cleared"), said("b", 300, "cleared")]
    assert opened(both) == [Opened(100, "score growth", None)]
    assert opened([*both[::2], said("b", 250)]) == [Opened(100, "score growth", None), Opened(250, "rounding", None)]


@pytest.mark.parametrize("was", ["score growth", "other"])
def test_a_cause_that_is_corrected_opens_no_second_incident(was: str) -> None:
    story = [said("a", 100, cause=was), said("a", 200, "updated"), said("b", 300, cause="other")]
    assert opened(story) == [
        Opened(100, "rounding", None, corrected_from=was),  # type: ignore[arg-type]
        Opened(300, "other", None),
    ]


def test_a_correction_of_one_head_of_several_leaves_the_others_where_they_were() -> None:
    both = [said("a", 100, cause="other"), said("b", 150, cause="other")]
    assert opened([*both, said("a", 200, "updated")]) == [Opened(100, "other", None), Opened(200, "rounding", None)]
    grew = [said("a", 100, cause="score growth"), said("b", 150, cause="score growth"), said("a", 200, "updated")]
    assert opened(grew) == [Opened(100, "score growth", None)]
    assert opened([*grew, said("b", 250, "updated")]) == [Opened(100, "rounding", None, corrected_from="score growth")]
    into = [said("c", 50), *both, said("a", 200, "updated"), said("b", 250, "updated")]
    assert opened(into) == [Opened(50, "rounding", None), Opened(100, "other", None)]


def test_what_was_told_at_a_step_names_the_heads_that_come_to_harm_first() -> None:
    story = [
        said("a", 100, forecast_steps=900.0),
        said("b", 150, forecast_steps=100.0),
        said("c", 160),
        said("d", 170, forecast_steps=500.0),
        said("c", 900, "updated", forecast_steps=1.0),
    ]
    told = incident_at(story, 500)
    assert told is not None
    assert (told.cause, told.heads) == ("rounding", [(0, 1), (0, 3), (0, 0)])
    later = incident_at(story, 900)
    assert later is not None
    assert (0, 2) in later.heads
    assert incident_at(story, 99) is None
    assert incident_at([*story[:1], said("a", 300, "cleared")], 400) is None


def test_the_head_that_fails_is_the_first_past_512_or_the_one_that_drifted_farthest_at_the_harm(tmp_path: Path) -> None:
    failing = read_trace(record(tmp_path / "f.jsonl.gz", fails=True))
    healthy = read_trace(record(tmp_path / "h.jsonl.gz", fails=False))
    assert failing_head(failing, None) == (0, 1)
    assert failing_head(healthy, None) is None
    assert failing_head(healthy, 3000) is None or failing_head(healthy, 3000) == (0, 1)
    assert len(failing.heads) == HEADS
