"""The incidents of a run in words, as JSON, and acknowledged."""

import json

from tests.cli.typed import foreshock

from foreshock.server.testing import FakeRank, LiveService


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
