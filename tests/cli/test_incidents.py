"""The incidents of a run in words, as JSON, and acknowledged."""

import json

from tests.cli.typed import foreshock

from foreshock.server.testing import FakeRank, LiveService


def test_an_incident_of_two_causes_lists_its_remedies_in_their_order(service: LiveService) -> None:
    rank = FakeRank(run="torn", boot="b8")
    growth = rank.verdict(1, head=1, name="warn-2", cause="score growth", signal="score")
    service.post(rank.batch(rank.started(qk_clip="never"), rank.sample(1), rank.verdict(1), growth))
    (incident,) = json.loads(foreshock("incidents", "torn", "--json", "--url", service.url).output)
    assert incident["causes"] == ["rounding", "score growth"]
    told = foreshock("incidents", "torn", "--url", service.url).output
    assert told.startswith("rounding  rounding and score growth  open  warning  since step 1\n")
    assert "  1. now: A switch of the heads that drift: it changes rounding alone, and can be undone.\n" in told
    assert "  2. later: QK-Clip for the scores that grow: it scales weights for good.\n" in told


def test_incidents_are_told_in_words_or_whole_as_json_and_acknowledged(service: LiveService) -> None:
    rank = FakeRank(run="ill", boot="b7")
    service.post(rank.batch(rank.started(), rank.sample(1), rank.verdict(1), rank.verdict(1, head=1, name="warn-2")))
    told = foreshock("incidents", "ill", "--url", service.url)
    assert told.exit_code == 0, told.output
    (incident,) = json.loads(foreshock("incidents", "ill", "--json", "--url", service.url).output)
    assert incident["sentence"] in told.output
    assert all(head["sentence"] in told.output for head in incident["heads"])
    assert len(incident["heads"]) == 2
    care = ["--acknowledge", incident["id"], "--reason", "ann looks"]
    assert "acknowledged" in foreshock("incidents", "ill", *care, "--url", service.url).output
    assert foreshock("incidents", "run-1", "--url", service.url).output == "run-1 has no incident.\n"
    half = foreshock("incidents", "ill", "--acknowledge", incident["id"], "--url", service.url)
    assert half.exit_code == 1
    assert "give both or neither" in half.stderr
    unknown = foreshock("incidents", "ill", "--acknowledge", "nope", "--reason", "x", "--url", service.url)
    assert unknown.exit_code == 1
    assert "nope" in unknown.stderr
