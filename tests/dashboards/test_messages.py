"""What people read, as Alertmanager's own tool renders the messages of the shipped template."""

from pathlib import Path
from typing import Any

import pytest
from tests.dashboards.every_alert import rendered

pytestmark = pytest.mark.servers

LABELS = {"alertname": "ForeshockHeadFailing", "run": "a<b>&c", "severity": "critical", "cause": "rounding"}
ANNOTATIONS = {
    "summary": "Run a<b>&c: rounding in layer 0 head 2",
    "description": "The signal offset tripped. Largest |score| reaches 512 in about 1.8k steps.",
    "done": "The head is switched.",
    "action": "Switch the head to exact_delta.",
    "page_url": "http://127.0.0.1:8765/?runs=a",
    "dashboard_url": "http://127.0.0.1:3000/d/foreshock-run?var-run=a",
    "runbook_url": "docs/runbooks/ForeshockHeadFailing.md",
}
FIRING = """\
Critical: Run a<b>&c: rounding in layer 0 head 2

Run a<b>&c: rounding in layer 0 head 2.
The signal offset tripped. Largest |score| reaches 512 in about 1.8k steps.
Done: The head is switched.
To do: Switch the head to exact_delta.
Since 2026-11-21 03:04 UTC.
Evidence and switch: http://127.0.0.1:8765/?runs=a
Dashboard: http://127.0.0.1:3000/d/foreshock-run?var-run=a
Runbook: docs/runbooks/ForeshockHeadFailing.md"""


def alert(status: str = "firing", annotations: dict[str, str] = ANNOTATIONS, **labels: str) -> dict[str, Any]:
    return {"status": status, "labels": LABELS | labels, "annotations": annotations}


def test_people_read_what_where_why_how_long_what_was_done_and_where_to_look(tmp_path: Path) -> None:
    assert rendered([alert()], tmp_path).strip() == FIRING
    over = rendered([alert("resolved")], tmp_path)
    assert over.startswith(f"No longer alerting: {ANNOTATIONS['summary']}\n")
    assert "Either its warnings are over or the run has ended, since 2026-11-21" in over
    assert "To do" not in over


def test_several_alerts_of_a_run_make_one_message_and_missing_annotations_leave_no_hole(tmp_path: Path) -> None:
    kept = {key: ANNOTATIONS[key] for key in ("summary", "description", "action")}
    title, text = rendered([alert(annotations=kept, cause=cause) for cause in "abc"], tmp_path).split("\n", 1)
    assert title == "Critical: 3 alerts ForeshockHeadFailing in run a<b>&c"
    assert text.count(ANNOTATIONS["summary"]) == 3
    assert text.count("To do: Switch the head to exact_delta.") == 1
    assert "<no value>" not in text
    assert "Done:" not in text


def test_96_alerts_of_a_run_are_one_readable_message_that_says_how_bad_the_worst_is(tmp_path: Path) -> None:
    """One for each head, of either severity, as rules that a user writes may send them."""
    run = "x" * 128
    heads = [alert(run=run, head=str(head), severity="critical" if head == 95 else "warning") for head in range(96)]
    title, text = rendered(heads, tmp_path).split("\n", 1)
    assert title == f"Critical: 96 alerts ForeshockHeadFailing in run {run}"
    assert len(text) < 1500
    assert "96 in all" in text
