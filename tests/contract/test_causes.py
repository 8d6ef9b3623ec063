"""The list of causes: its names, its words and what follows from them."""

from typing import get_args

from foreshock.contract.causes import CAUSES, Cause, IncidentCause, curable, incident_id, mates
from foreshock.contract.metrics.catalog import BY_KEY


def test_every_cause_that_is_named_has_one_entry_and_the_causes_that_runs_have_stored_keep_their_names() -> None:
    assert {"rounding", "score growth", "not finite", "other"} <= set(CAUSES)
    assert set(CAUSES) == set(get_args(IncidentCause)) == {*get_args(Cause), "not finite"}


def test_a_cause_is_shown_by_a_metric_that_has_a_chart() -> None:
    for cause in CAUSES.values():
        assert BY_KEY[cause.shown_by].chart is not None


def test_no_two_causes_are_one_incident_by_its_name() -> None:
    assert len({incident_id(cause) for cause in CAUSES}) == len(CAUSES)


def test_causes_that_join_are_one_incident_and_every_other_is_its_own() -> None:
    both: set[IncidentCause] = {"rounding", "score growth"}
    for cause in CAUSES:
        assert mates(cause) == (both if cause in both else {cause})
    assert [cause for cause in CAUSES if curable(cause)] == ["rounding"]
