"""Runs in tables and as JSON; orders to them, and exit codes that tell ordered from answered."""

import csv
import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.cli.typed import foreshock
from tests.server.answering import AnsweringAgent
from typer.testing import CliRunner

from foreshock.cli.main import app
from foreshock.cli.orders import print_command
from foreshock.cli.runs import policy_of, state_of
from foreshock.client import Service
from foreshock.contract.wire import Finished, Outcome
from foreshock.server.settings import Token
from foreshock.server.testing import FakeRank, LiveService


def test_runs_lists_the_runs_and_shows_one(service: LiveService) -> None:
    listed = foreshock("runs", "--url", service.url)
    assert "run-1" in listed.output
    assert "2.5" in listed.output
    shown = foreshock("runs", "run-1", "--url", service.url)
    assert "h.1.attn" in shown.output
    assert "No active warning." in shown.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nope", "--mode", "exact_delta"], "There is no run 'nope'"),
        (["run-1", "--mode", "fast"], "Mode 'fast' does not exist; allowed are plain, exact_delta"),
        (["run-1", "--mode", "plain", "--layer", "9"], "run run-1 has no layer 9; `foreshock runs run-1` lists them"),
        (["run-1", "--mode", "plain", "--layer", "0", "--head", "7"], "Run run-1 has no layer 0 head 7"),
        (["run-1", "--mode", "plain", "--head", "1"], "--head needs --layer"),
        (["run-1"], "use --mode"),
        (["run-1", "--mode", "plain", "--undo", "last"], "--undo or --cancel without a mode"),
        (["run-1", "--undo", "cmd-nope"], "There is no command 'cmd-nope'"),
        (["run-1", "--undo", "last", "--cancel", "last"], "--undo or --cancel without a mode"),
        (["run-1", "--cancel", "last", "--layer", "0"], "--undo or --cancel without a mode"),
        (["run-1", "--cancel", "last"], "no pending command"),
    ],
)
def test_an_impossible_switch_is_a_sentence(service: LiveService, words: list[str], sentence: str) -> None:
    done = foreshock("switch", *words, "--reason", "test", "--url", service.url)
    assert done.exit_code == 1
    assert sentence in done.stderr


def test_a_switch_waits_for_the_agent_and_says_what_changed(service: LiveService) -> None:
    with AnsweringAgent(service, FakeRank(run="run-2", boot="b2")):
        order = ["--layer", "1", "--head", "2", "--mode", "exact_delta", "--reason", "its offset doubles"]
        done = foreshock("switch", "run-2", *order, "--url", service.url)
        undo = ["--undo", "last", "--reason", "a mistake"]
        undone = foreshock("switch", "run-2", *undo, "--url", service.url)
        again = foreshock("switch", "run-2", *undo, "--url", service.url)
    assert done.exit_code == 0, done.output
    assert "layer 1 head 2: plain -> exact_delta" in done.output
    assert undone.exit_code == 0, undone.output
    assert "layer 1 head 2: exact_delta -> plain" in undone.output
    assert again.exit_code == 1
    assert "run run-2 has no applied switch to revert" in again.stderr


def test_a_switch_of_every_head_leaves_modes_that_were_set_by_hand_beside_the_new_one(service: LiveService) -> None:
    with AnsweringAgent(service, FakeRank(run="run-own", boot="b2")):
        own = ["--layer", "1", "--head", "2", "--mode", "paper_softmax", "--reason", "set by hand"]
        assert foreshock("switch", "run-own", *own, "--url", service.url).exit_code == 0
        every = ["--mode", "row_corrected", "--reason", "its offset doubles", "--url", service.url]
        done = foreshock("switch", "run-own", *every)
        again = foreshock("switch", "run-own", *every)
    assert done.exit_code == 0, done.output
    assert "layer 1 head 2: paper_softmax -> paper_softmax+row_corrected" in done.output
    assert done.output.count("plain -> row_corrected") == 5
    assert again.exit_code == 0
    assert "1 heads already combine row_corrected with other modes" in again.stderr


def test_an_order_without_an_answer_stands_until_it_is_stopped_from_the_command_line(service: LiveService) -> None:
    rank = FakeRank(run="run-3")
    service.post(rank.batch(rank.started(), rank.sample(1)))
    order = ["--mode", "exact_delta", "--reason", "it drifts", "--wait", "0"]
    ordered = foreshock("switch", "run-3", *order, "--url", service.url)
    assert ordered.exit_code == 3
    assert "The command stays pending" in ordered.output
    assert len(service.post(rank.batch(rank.sample(2))).commands) == 1
    stopped = foreshock("switch", "run-3", "--cancel", "last", "--reason", "the wrong run", "--url", service.url)
    assert stopped.exit_code == 0, stopped.output
    assert ": cancelled" in stopped.output
    assert "rank 0 had it: no answer yet" in stopped.output
    assert service.post(rank.batch(rank.sample(3))).commands == ()


def test_who_waits_for_an_answer_is_told_when_the_run_ends_without_one(service: LiveService) -> None:
    rank = FakeRank(run="run-ending")
    service.post(rank.batch(rank.started(), rank.sample(1)))

    def end_once_it_is_ordered() -> None:
        with service.client() as client:
            while not client.get("/v1/runs/run-ending/commands").json()["commands"]:
                time.sleep(0.05)
        service.post(rank.batch(Finished(step=1, unix_seconds=1.0, status="completed")))

    ending = threading.Thread(target=end_once_it_is_ordered, daemon=True)
    ending.start()
    order = ["--mode", "plain", "--layer", "0", "--reason", "nearly too late", "--wait", "60"]
    done = foreshock("switch", "run-ending", *order, "--url", service.url)
    ending.join()
    assert done.exit_code == 4, done.output
    said = " ".join(done.output.split())
    assert ": refused Could not switch layer 0 head 0, layer 0 head 1 and layer 0 head 2 to " in said
    assert "Order it again when the run is resumed." in said


LONG = "sweep/2026-11-22/" + "a-very-long-name-" * 6 + "seed-8"


@pytest.fixture(scope="module")
def crowded(service: LiveService) -> LiveService:
    rank = FakeRank(run=LONG, boot="b9")
    service.post(rank.batch(rank.started(), rank.sample(1), rank.sample(2, loss=2.5)))
    return service


def test_a_long_name_stands_whole_in_a_pipe(crowded: LiveService) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-P", "-m", "foreshock", "runs", "--url", crowded.url]
    assert LONG in subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_what_runs_says_as_json_is_what_the_service_says(crowded: LiveService) -> None:
    listed = json.loads(foreshock("runs", "--json", "--url", crowded.url).output)
    said = httpx.get(f"{crowded.url}/v1/runs", timeout=10).json()["runs"]
    assert [run["run"] for run in listed] == [run["run"] for run in said]
    shown = json.loads(foreshock("runs", LONG, "--json", "--url", crowded.url).output)
    assert (shown["run"], len(shown["layers"])) == (LONG, 2)


def test_a_curve_is_exported_as_csv(crowded: LiveService) -> None:
    curve = foreshock("export", LONG, "run.loss", "--url", crowded.url).output
    assert [(point["step"], point["last"]) for point in csv.DictReader(io.StringIO(curve))] == [
        ("1", "3.0"),
        ("2", "2.5"),
    ]
    worst = foreshock("export", LONG, "head.score_max", "--layer", "1", "--url", crowded.url).output
    assert {point["worst_head"] for point in csv.DictReader(io.StringIO(worst))} <= {"0", "1", "2"}


@pytest.mark.parametrize(
    ("policy", "scope", "said"),
    [
        ("auto", "layer", "policy auto (a warning switches all heads of its layer)"),
        ("approve", "head", "policy approve (a warning proposes to switch its head)"),
        ("observe", "model", "policy observe"),
    ],
)
def test_the_policy_is_printed_with_what_a_warning_switches_under_it(policy: str, scope: str | None, said: str) -> None:
    assert policy_of({"policy": policy, "switch_scope": scope}) == said


@pytest.mark.parametrize(("outcome", "code"), [("applied", 0), ("refused", 4), (None, 3)])
def test_the_exit_code_tells_ordered_from_answered(service: LiveService, outcome: Outcome | None, code: int) -> None:
    rank = FakeRank(run=f"codes-{code}", boot="b3")
    with AnsweringAgent(service, rank, outcome):
        order = ["--mode", "exact_delta", "--reason", "a script", "--wait", "30" if outcome else "0.5", "--json"]
        done = foreshock("switch", rank.run, *order, "--url", service.url)
    assert done.exit_code == code, done.output
    [command] = json.loads(done.output)["commands"]
    assert command["state"] in {0: ["applied"], 4: ["refused"], 3: ["pending", "delivered"]}[code]


def test_a_silent_run_is_listed_with_how_long_it_is_silent_in_the_unit_that_people_use() -> None:
    for now, said in ((82.0, "42 s"), (1000.0, "16 min"), (10_840.0, "3 h"), (1e6, "12 days"), (37.0, "0 s")):
        assert state_of({"condition": "silent", "condition_since_unix_seconds": 40.0}, now) == f"silent {said}"
    assert state_of({"condition": "active", "condition_since_unix_seconds": None}, 1000.0) == "active"


def test_what_an_agent_or_a_person_wrote_moves_no_cursor_and_is_no_markup(
    service: LiveService, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token that may only ingest writes what the one on call reads in a terminal."""
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[/bold][red]x[/red]:fire:"
    rank = FakeRank(run="evil:fire:1", boot="b9")
    warned = rank.verdict(1, sentence=f"Drifts {evil}", signal=evil)
    service.post(rank.batch(rank.started(), rank.sample(1), warned))
    with service.client() as client:
        said = {"who": f"Eve {evil}", "notes": f"Notes {evil}", "display_name": "[/bold]", "tags": ["[/red]"]}
        assert client.patch("/v1/runs/evil:fire:1", json=said).status_code == 200
        order = {"who": "Eve", "reason": f"Because {evil}", "mode": "exact_delta"}
        assert client.post("/v1/runs/evil:fire:1/commands", json=order).status_code == 201
    [made] = service.post(rank.batch(rank.sample(2))).commands
    refused = rank.answer(made, 2, "refused").model_copy(update={"reason": f"Refused {evil}"})
    service.post(rank.batch(refused))
    asked = (
        ("runs", "evil:fire:1"),
        ("runs",),
        ("incidents", "evil:fire:1"),
        ("describe", "evil:fire:1", "--tag", "new"),
        ("runs", "evil:fire:1", "--json"),
        ("incidents", "evil:fire:1", "--json"),
    )
    for words in asked:
        told = foreshock(*words, "--url", service.url)
        assert told.exit_code == 0, told.output
        assert [each for each in told.stdout if not each.isprintable() and each not in "\n\ufffd"] == [], words
        if "--json" not in words:
            assert "\N{FIRE}" not in told.stdout
    assert "evil:fire:1" in foreshock("runs", "--url", service.url).stdout
    assert "[/bold][red]x[/red]" in foreshock("runs", "evil:fire:1", "--url", service.url).stdout
    with Service(service.url) as client:
        print_command(client.command(made.id), 1.0)
    printed = capsys.readouterr().out
    assert "Refused" in printed
    assert not set(printed) & set("\x1b\x07\x9b\u202e")


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
    assert "cannot be undone" not in refused.output
