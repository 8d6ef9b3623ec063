"""The commands `runs`, `switch`, `export`, `describe` and `delete`: output, errors and exit codes."""

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
from tests.server.answering_agent import AnsweringAgent
from typer.testing import CliRunner

from foreshock.cli.main import app
from foreshock.cli.orders import print_command
from foreshock.cli.runs import policy_of, state_of
from foreshock.client import Service
from foreshock.contract.wire import Finished, Outcome
from foreshock.server.settings import Token
from foreshock.server.testing import FakeRank, LiveService


def test_runs_lists_all_runs_or_shows_one(service: LiveService) -> None:
    listed = foreshock("runs", "--url", service.url)
    assert "run-1" in listed.output
    assert "2.5" in listed.output
    shown = foreshock("runs", "run-1", "--url", service.url)
    assert "h.1.attn" in shown.output
    assert "No active warning." in shown.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
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
        (["run-1", "--cancel", "last", "--dry-run"], "--dry-run is for a switch or --undo: leave it out"),
    ],
)
def test_invalid_switch_is_rejected_with_a_reason(service: LiveService, arguments: list[str], sentence: str) -> None:
    done = foreshock("switch", *arguments, "--reason", "test", "--url", service.url)
    assert done.exit_code == 1
    assert sentence in done.stderr


def test_switch_and_undo_wait_for_the_agent_and_print_the_mode_change(service: LiveService) -> None:
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


def test_undo_requires_the_run_of_the_switch_and_last_skips_ineffective_switches(service: LiveService) -> None:
    with AnsweringAgent(service, FakeRank(run="run-twice", boot="b2")):
        order = ["--layer", "1", "--head", "2", "--mode", "exact_delta", "--reason", "its offset doubles", "--json"]
        done, _ = (foreshock("switch", "run-twice", *order, "--url", service.url) for _ in range(2))
        command = json.loads(done.stdout)["commands"][0]["id"]
        undo = ["--reason", "a mistake", "--url", service.url, "--undo"]
        elsewhere = foreshock("switch", "run-1", *undo, command)
        undone = foreshock("switch", "run-twice", *undo, "last")
    assert elsewhere.exit_code == 1
    assert f"command {command} belongs to run run-twice" in elsewhere.stderr
    assert undone.exit_code == 0, undone.output
    assert "layer 1 head 2: exact_delta -> plain" in undone.output


def test_switching_all_heads_preserves_manually_set_modes(service: LiveService) -> None:
    with AnsweringAgent(service, FakeRank(run="run-manual", boot="b2")):
        manual = ["--layer", "1", "--head", "2", "--mode", "paper_softmax", "--reason", "set by hand"]
        assert foreshock("switch", "run-manual", *manual, "--url", service.url).exit_code == 0
        all_heads = ["--mode", "row_corrected", "--reason", "its offset doubles", "--url", service.url]
        done = foreshock("switch", "run-manual", *all_heads)
        again = foreshock("switch", "run-manual", *all_heads)
    assert done.exit_code == 0, done.output
    assert "layer 1 head 2: paper_softmax -> paper_softmax+row_corrected" in done.output
    assert done.output.count("plain -> row_corrected") == 5
    assert again.exit_code == 0
    assert "1 heads already combine row_corrected with other modes" in again.stderr


def test_unanswered_switch_stays_pending_until_cancelled(service: LiveService) -> None:
    rank = FakeRank(run="run-3")
    service.post(rank.batch(rank.started(), rank.sample(1)))
    order = ["--mode", "exact_delta", "--reason", "it drifts", "--wait", "0"]
    ordered = foreshock("switch", "run-3", *order, "--url", service.url)
    assert ordered.exit_code == 3
    assert "The command stays pending" in ordered.output
    assert "`foreshock incidents run-3` shows its state" in ordered.output
    assert foreshock("switch", "run-3", *order, "--wait", "-1", "--url", service.url).exit_code == 2
    assert len(service.post(rank.batch(rank.sample(2))).commands) == 1
    cancelled = foreshock("switch", "run-3", "--cancel", "last", "--reason", "the wrong run", "--url", service.url)
    assert cancelled.exit_code == 0, cancelled.output
    assert ": cancelled" in cancelled.output
    assert "rank 0 had it: no answer yet" in cancelled.output
    assert service.post(rank.batch(rank.sample(3))).commands == ()


def test_waiting_switch_is_reported_as_refused_when_the_run_ends(service: LiveService) -> None:
    rank = FakeRank(run="run-ending")
    service.post(rank.batch(rank.started(), rank.sample(1)))

    def end_after_the_order() -> None:
        with service.client() as client:
            while not client.get("/v1/runs/run-ending/commands").json()["commands"]:
                time.sleep(0.05)
        service.post(rank.batch(Finished(step=1, unix_seconds=1.0, status="completed")))

    ending = threading.Thread(target=end_after_the_order, daemon=True)
    ending.start()
    order = ["--mode", "plain", "--layer", "0", "--reason", "nearly too late", "--wait", "60"]
    done = foreshock("switch", "run-ending", *order, "--url", service.url)
    ending.join()
    assert done.exit_code == 4, done.output
    output = " ".join(done.output.split())
    assert ": refused Could not switch layer 0 head 0, layer 0 head 1 and layer 0 head 2 to " in output
    assert "Order it again when the run is resumed." in output


LONG_NAME = "sweep/2026-11-22/" + "a-very-long-name-" * 6 + "seed-8"


@pytest.fixture(scope="module")
def service_with_long_name(service: LiveService) -> LiveService:
    rank = FakeRank(run=LONG_NAME, boot="b9")
    service.post(rank.batch(rank.started(), rank.sample(1), rank.sample(2, loss=2.5)))
    return service


def test_long_run_name_is_not_truncated_in_a_pipe(service_with_long_name: LiveService) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-P", "-m", "foreshock", "runs", "--url", service_with_long_name.url]
    assert LONG_NAME in subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_runs_json_matches_the_service_response(service_with_long_name: LiveService) -> None:
    listed = json.loads(foreshock("runs", "--json", "--url", service_with_long_name.url).output)
    served = httpx.get(f"{service_with_long_name.url}/v1/runs", timeout=10).json()["runs"]
    assert [run["run"] for run in listed] == [run["run"] for run in served]
    shown = json.loads(foreshock("runs", LONG_NAME, "--json", "--url", service_with_long_name.url).output)
    assert (shown["run"], len(shown["layers"])) == (LONG_NAME, 2)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["run.loss", "--layer", "1"], 1, "run.loss is a metric of the whole run; leave out the layer"),
        (["run.loss", "--points", "10001"], 2, "less than or equal to 10000"),
    ],
)
def test_invalid_export_is_rejected_with_a_reason(
    service_with_long_name: LiveService, arguments: list[str], code: int, sentence: str
) -> None:
    done = foreshock("export", LONG_NAME, *arguments, "--url", service_with_long_name.url)
    assert done.exit_code == code
    assert sentence in done.stderr


def test_curve_is_exported_as_csv(service_with_long_name: LiveService) -> None:
    curve = foreshock("export", LONG_NAME, "run.loss", "--url", service_with_long_name.url).output
    assert [(point["step"], point["last"]) for point in csv.DictReader(io.StringIO(curve))] == [
        ("1", "3.0"),
        ("2", "2.5"),
    ]
    worst = foreshock("export", LONG_NAME, "head.score_max", "--layer", "1", "--url", service_with_long_name.url).output
    assert {point["worst_head"] for point in csv.DictReader(io.StringIO(worst))} <= {"0", "1", "2"}


@pytest.mark.parametrize(
    ("policy", "scope", "expected"),
    [
        ("auto", "layer", "policy auto (a warning switches all heads of its layer)"),
        ("approve", "head", "policy approve (a warning proposes to switch its head)"),
        ("observe", "model", "policy observe"),
    ],
)
def test_policy_is_printed_with_the_heads_that_a_warning_switches(
    policy: str, scope: str | None, expected: str
) -> None:
    assert policy_of({"policy": policy, "switch_scope": scope}) == expected


@pytest.mark.parametrize(("outcome", "code"), [("applied", 0), ("refused", 4), (None, 3)])
def test_exit_code_distinguishes_applied_refused_and_pending_switches(
    service: LiveService, outcome: Outcome | None, code: int
) -> None:
    rank = FakeRank(run=f"codes-{code}", boot="b3")
    with AnsweringAgent(service, rank, outcome):
        order = ["--mode", "exact_delta", "--reason", "a script", "--wait", "30" if outcome else "0.5", "--json"]
        done = foreshock("switch", rank.run, *order, "--url", service.url)
    assert done.exit_code == code, done.output
    [command] = json.loads(done.output)["commands"]
    assert command["state"] in {0: ["applied"], 4: ["refused"], 3: ["pending", "delivered"]}[code]


def test_silent_run_is_listed_with_its_silence_in_a_readable_unit() -> None:
    for now, expected in ((82.0, "42 s"), (1000.0, "16 min"), (10_840.0, "3 h"), (1e6, "12 days"), (37.0, "0 s")):
        assert state_of({"condition": "silent", "condition_since_unix_seconds": 40.0}, now) == f"silent {expected}"
    assert state_of({"condition": "active", "condition_since_unix_seconds": None}, 1000.0) == "active"


def test_text_from_agents_and_users_cannot_control_the_terminal_or_add_markup(
    service: LiveService, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token that may only ingest can write text that the person on call reads in a terminal."""
    hostile = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[/bold][red]x[/red]:fire:"
    rank = FakeRank(run="hostile:fire:1", boot="b9")
    warned = rank.verdict(1, sentence=f"Drifts {hostile}", signal=hostile)
    service.post(rank.batch(rank.started(), rank.sample(1), warned))
    with service.client() as client:
        description = {
            "who": f"Eve {hostile}",
            "notes": f"Notes {hostile}",
            "display_name": "[/bold]",
            "tags": ["[/red]"],
        }
        assert client.patch("/v1/runs/hostile:fire:1", json=description).status_code == 200
        order = {"who": "Eve", "reason": f"Because {hostile}", "mode": "exact_delta"}
        assert client.post("/v1/runs/hostile:fire:1/commands", json=order).status_code == 201
    [sent] = service.post(rank.batch(rank.sample(2))).commands
    refused = rank.answer(sent, 2, "refused").model_copy(update={"reason": f"Refused {hostile}"})
    service.post(rank.batch(refused))
    commands = (
        ("runs", "hostile:fire:1"),
        ("runs",),
        ("incidents", "hostile:fire:1"),
        ("describe", "hostile:fire:1", "--tag", "new"),
        ("runs", "hostile:fire:1", "--json"),
        ("incidents", "hostile:fire:1", "--json"),
    )
    for arguments in commands:
        result = foreshock(*arguments, "--url", service.url)
        assert result.exit_code == 0, result.output
        assert [
            character for character in result.stdout if not character.isprintable() and character not in "\n\ufffd"
        ] == [], arguments
        if "--json" not in arguments:
            assert "\N{FIRE}" not in result.stdout
    assert "hostile:fire:1" in foreshock("runs", "--url", service.url).stdout
    assert "[/bold][red]x[/red]" in foreshock("runs", "hostile:fire:1", "--url", service.url).stdout
    with Service(service.url) as client:
        print_command(client.command(sent.id), 1.0)
    printed = capsys.readouterr().out
    assert "Refused" in printed
    assert not set(printed) & set("\x1b\x07\x9b\u202e")


def test_describe_adds_replaces_and_removes_name_tags_and_notes(service: LiveService) -> None:
    rank = FakeRank(run="described")
    service.post(rank.batch(rank.started()))

    def describe(*arguments: str) -> dict[str, object]:
        done = foreshock("describe", "described", *arguments, "--json", "--url", service.url)
        assert done.exit_code == 0, done.output
        return dict(json.loads(done.output))

    first = describe(
        "--name", "The described run", "--tag", "lr 6e-4", "--tag", "baseline", "--note", "loss rose at 900"
    )
    assert (first["display_name"], first["tags"], first["notes"]) == (
        "The described run",
        ["baseline", "lr 6e-4"],
        "loss rose at 900",
    )
    then = describe("--untag", "baseline", "--name", "")
    assert (then["display_name"], then["tags"], then["notes"]) == (None, ["lr 6e-4"], "loss rose at 900")
    absent = foreshock("describe", "described", "--untag", "nightly", "--url", service.url)
    assert absent.exit_code == 1
    assert "run described has no tag 'nightly'; it has lr 6e-4" in absent.stderr
    nothing = foreshock("describe", "described", "--url", service.url)
    assert nothing.exit_code == 1
    assert "--name, --tag, --untag or --note" in nothing.stderr


def test_active_run_cannot_be_deleted_and_ended_run_needs_confirmation(service: LiveService) -> None:
    rank = FakeRank(run="to-delete")
    service.post(rank.batch(rank.started(), rank.sample(1)))
    arguments = ("delete", "to-delete", "--reason", "a rehearsal", "--url", service.url)
    refused = foreshock(*arguments, "--yes")
    assert refused.exit_code == 1, refused.output
    service.post(rank.batch(Finished(step=1, unix_seconds=2.0, status="completed")))
    declined = CliRunner().invoke(app, list(arguments), input="n\n")
    assert declined.exit_code == 1
    assert "to-delete" in foreshock("runs", "--url", service.url).output
    assert "is deleted" in CliRunner().invoke(app, list(arguments), input="y\n").output
    assert "to-delete" not in foreshock("runs", "--url", service.url).output


@pytest.mark.full
def test_delete_without_the_scope_is_rejected_without_a_confirmation_prompt(tmp_path: Path) -> None:
    secret = "long-enough-secret"
    reader = Token.of("reader", secret, ("ingest", "read"))
    tokens = json.dumps([reader.model_dump(mode="json")])
    with LiveService(tmp_path, {"FORESHOCK_TOKENS": tokens}) as restricted:
        rank = FakeRank(run="owned-by-others")
        restricted.post(rank.batch(rank.started()), secret)
        arguments = ("delete", "owned-by-others", "--reason", "a rehearsal", "--url", restricted.url, "--token", secret)
        refused = foreshock(*arguments)
    assert refused.exit_code == 1
    assert "the token reader lacks the scope 'delete'" in refused.stderr
    assert "cannot be undone" not in refused.output
