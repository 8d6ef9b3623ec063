"""The list of causes: names, charts, incident IDs and shared incidents."""

from typing import get_args

from foreshock.contract.causes import CAUSES, Cause, IncidentCause, curable, incident_id, mates
from foreshock.contract.metrics.catalog import BY_KEY


def test_every_cause_has_an_entry_and_stored_causes_keep_their_names() -> None:
    assert {"rounding", "score growth", "not finite", "other"} <= set(CAUSES)
    assert set(CAUSES) == set(get_args(IncidentCause)) == {*get_args(Cause), "not finite"}


def test_every_cause_names_a_metric_with_a_chart() -> None:
    for cause in CAUSES.values():
        assert BY_KEY[cause.shown_by].chart is not None


def test_incident_ids_of_causes_are_unique() -> None:
    assert len({incident_id(cause) for cause in CAUSES}) == len(CAUSES)


def test_only_rounding_and_score_growth_share_an_incident() -> None:
    both: set[IncidentCause] = {"rounding", "score growth"}
    for cause in CAUSES:
        assert mates(cause) == (both if cause in both else {cause})
    assert [cause for cause in CAUSES if curable(cause)] == ["rounding"]
