"""What people keep of a run, and runs that are deleted."""

import json
from pathlib import Path

import pytest
from tests.cli.typed import foreshock
from typer.testing import CliRunner

from foreshock.cli.main import app
from foreshock.contract.wire import Finished
from foreshock.server.settings import Token
from foreshock.server.testing import FakeRank, LiveService


def test_what_people_keep_of_a_run_is_added_replaced_and_taken_away(service: LiveService) -> None:
    rank = FakeRank(run="kept")
    service.post(rank.batch(rank.started()))

    def describe(*words: str) -> dict[str, object]:
        done = foreshock("describe", "kept", *words, "--json", "--url", service.url)
        assert done.exit_code == 0, done.output
        return dict(json.loads(done.output))

    first = describe("--name", "The kept one", "--tag", "lr 6e-4", "--tag", "baseline", "--note", "loss rose at 900")
    assert (first["display_name"], first["tags"], first["notes"]) == (
        "The kept one",
        ["baseline", "lr 6e-4"],
        "loss rose at 900",
    )
    then = describe("--untag", "baseline", "--name", "")
    assert (then["display_name"], then["tags"], then["notes"]) == (None, ["lr 6e-4"], "loss rose at 900")
    absent = foreshock("describe", "kept", "--untag", "nightly", "--url", service.url)
    assert absent.exit_code == 1
    assert "run kept has no tag 'nightly'; it has lr 6e-4" in absent.stderr
    nothing = foreshock("describe", "kept", "--url", service.url)
    assert nothing.exit_code == 1
    assert "--name, --tag, --untag or --note" in nothing.stderr


def test_a_run_that_trains_is_not_deleted_and_one_that_ended_is_when_it_is_confirmed(service: LiveService) -> None:
    rank = FakeRank(run="to-delete")
    service.post(rank.batch(rank.started(), rank.sample(1)))
    words = ("delete", "to-delete", "--reason", "a rehearsal", "--url", service.url)
    refused = foreshock(*words, "--yes")
    assert refused.exit_code == 1, refused.output
    service.post(rank.batch(Finished(step=1, unix_seconds=2.0, status="completed")))
    unsure = CliRunner().invoke(app, list(words), input="n\n")
    assert unsure.exit_code == 1
    assert "to-delete" in foreshock("runs", "--url", service.url).output
    assert "is deleted" in CliRunner().invoke(app, list(words), input="y\n").output
    assert "to-delete" not in foreshock("runs", "--url", service.url).output


@pytest.mark.full
def test_who_may_not_delete_is_not_asked_to_confirm_it(tmp_path: Path) -> None:
    secret = "long-enough-secret"
    reader = Token.of("reader", secret, ("ingest", "read"))
    tokens = json.dumps([reader.model_dump(mode="json")])
    with LiveService(tmp_path, {"FORESHOCK_TOKENS": tokens}) as guarded:
        rank = FakeRank(run="kept-by-others")
        guarded.post(rank.batch(rank.started()), secret)
        words = ("delete", "kept-by-others", "--reason", "a rehearsal", "--url", guarded.url, "--token", secret)
        refused = foreshock(*words)
    assert refused.exit_code == 1
    assert "the token reader lacks the scope 'delete'" in refused.stderr
    assert "cannot be taken back" not in refused.output
