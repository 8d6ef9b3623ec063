"""What a person types, and the sentence that comes back, good input or bad."""

import csv
import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main
from typer.testing import CliRunner, Result

from foreshock import __version__
from foreshock.cli.main import app
from foreshock.contract.wire import Ack, Batch, Finished, Outcome, Switched
from foreshock.server.testing import FakeRank, LiveService

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "lab" / "traces" / "key-bias_fp32_batch32.jsonl.gz"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FORESHOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "160")


def foreshock(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """A service that knows one run with two layers of three heads."""
    with LiveService(tmp_path_factory.mktemp("service")) as live:
        rank = FakeRank(run="run-1")
        post(live, rank.batch(rank.started(), rank.sample(1), rank.sample(2, loss=2.5)))
        yield live


def post(live: LiveService, batch: Batch) -> Ack:
    reply = httpx.post(
        f"{live.url}/v1/batches",
        content=batch.model_dump_json(),
        headers={"Content-Type": "application/json"},
        timeout=10,
    )
    return Ack.model_validate_json(reply.raise_for_status().content)


def test_help_names_every_command_and_the_first_one_to_type() -> None:
    said = foreshock("--help").output
    for command in ("demo", "serve", "doctor", "runs", "switch", "replay", "lab", "bench", "dashboards"):
        assert command in said
    assert "Start with foreshock demo" in said


def test_the_version_is_the_package_s() -> None:
    assert foreshock("--version").output.strip() == f"foreshock {__version__}"


def test_the_module_and_the_script_are_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "foreshock", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == f"foreshock {__version__}"


def test_doctor_checks_attention_and_says_what_is_absent() -> None:
    done = foreshock("doctor", "--url", "http://127.0.0.1:9")
    assert done.exit_code == 0, done.output
    assert "within" in done.output
    assert "every row counted" in done.output
    assert "none answers at http://127.0.0.1:9" in done.output


def test_doctor_lists_what_would_be_watched_in_a_model() -> None:
    done = foreshock("doctor", "tests.monitor.tiny_models:tiny_gpt")
    assert done.exit_code == 0, done.output
    assert "W_Q and W_K" in done.output


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no_colon", "write module:factory"),
        ("json:dumps_nothing", "is not a callable that returns a torch.nn.Module"),
        ("torch.nn:Identity", "no attention was found in Identity"),
    ],
)
def test_doctor_refuses_what_is_no_model_with_a_sentence(path: str, sentence: str) -> None:
    done = foreshock("doctor", path)
    assert done.exit_code == 1
    assert sentence in done.stderr


def test_runs_lists_the_runs_and_shows_one(service: LiveService) -> None:
    listed = foreshock("runs", "--url", service.url)
    assert "run-1" in listed.output
    assert "2.5000" in listed.output
    shown = foreshock("runs", "run-1", "--url", service.url)
    assert "h.1.attn" in shown.output
    assert "No active warning." in shown.output


@pytest.mark.parametrize("words", [["runs"], ["runs", "run-1"]])
def test_a_service_that_is_down_is_a_sentence(words: list[str]) -> None:
    done = foreshock(*words, "--url", "http://127.0.0.1:9")
    assert done.exit_code == 1
    assert "no service answers at http://127.0.0.1:9" in done.stderr
    assert "foreshock serve" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nope", "--mode", "exact_delta"], "There is no run 'nope'"),
        (["run-1", "--mode", "fast"], "mode 'fast' does not exist; allowed are plain, exact_delta"),
        (["run-1", "--mode", "plain", "--layer", "9"], "run run-1 has no layer 9; it has 0, 1"),
        (["run-1", "--mode", "plain", "--layer", "0", "--head", "7"], "layer 0 has no head 7; it has 0 to 2"),
        (["run-1", "--mode", "plain", "--head", "1"], "--head was given without --layer"),
        (["run-1"], "give --mode"),
        (["run-1", "--mode", "plain", "--undo", "last"], "give --undo or --cancel alone"),
        (["run-1", "--undo", "cmd-nope"], "There is no command 'cmd-nope'"),
        (["run-1", "--undo", "last", "--cancel", "last"], "give --undo or --cancel alone"),
        (["run-1", "--cancel", "last", "--layer", "0"], "give --undo or --cancel alone"),
        (["run-1", "--cancel", "last"], "no order under way"),
    ],
)
def test_an_impossible_switch_is_a_sentence(service: LiveService, words: list[str], sentence: str) -> None:
    done = foreshock("switch", *words, "--reason", "test", "--url", service.url)
    assert done.exit_code == 1
    assert sentence in done.stderr


def test_a_switch_waits_for_the_agent_and_says_what_changed(service: LiveService) -> None:
    rank = FakeRank(run="run-2", boot="b2")
    post(service, rank.batch(rank.started(), rank.sample(1)))
    answering = threading.Event()

    def agent() -> None:
        step, mode = 1, "plain"
        while not answering.wait(0.1):
            step += 1
            for command in post(service, rank.batch(rank.sample(step))).commands:
                said = Switched(
                    id=f"s-{command.id}",
                    step=step,
                    command=command.id,
                    outcome="applied",
                    heads=command.heads or (),
                    before=(mode,),
                    after=(command.mode,),
                    reason=command.reason,
                )
                post(service, rank.batch(said))
                mode = command.mode

    thread = threading.Thread(target=agent)
    thread.start()
    try:
        order = ["--layer", "1", "--head", "2", "--mode", "exact_delta", "--reason", "its offset doubles"]
        done = foreshock("switch", "run-2", *order, "--url", service.url)
        undo = ["--undo", "last", "--reason", "a mistake"]
        undone = foreshock("switch", "run-2", *undo, "--url", service.url)
        again = foreshock("switch", "run-2", *undo, "--url", service.url)
    finally:
        answering.set()
        thread.join()
    assert done.exit_code == 0, done.output
    assert "layer 1 head 2: plain -> exact_delta" in done.output
    assert undone.exit_code == 0, undone.output
    assert "layer 1 head 2: exact_delta -> plain" in undone.output
    assert again.exit_code == 1
    assert "run run-2 has no applied switch that stands" in again.stderr


def test_an_order_that_nobody_has_answered_is_stopped_from_the_command_line(service: LiveService) -> None:
    rank = FakeRank(run="run-3")
    post(service, rank.batch(rank.started(), rank.sample(1)))
    order = ["--mode", "exact_delta", "--reason", "it drifts", "--wait", "0"]
    assert foreshock("switch", "run-3", *order, "--url", service.url).exit_code == 3
    assert len(post(service, rank.batch(rank.sample(2))).commands) == 1
    stopped = foreshock("switch", "run-3", "--cancel", "last", "--reason", "the wrong run", "--url", service.url)
    assert stopped.exit_code == 0, stopped.output
    assert ": cancelled" in stopped.output
    assert "rank 0 had it: no answer yet" in stopped.output
    assert post(service, rank.batch(rank.sample(3))).commands == ()


def test_a_switch_without_an_answer_says_that_the_order_stands(service: LiveService) -> None:
    order = ["--mode", "exact_delta", "--reason", "nobody listens", "--wait", "0.3"]
    done = foreshock("switch", "run-1", *order, "--url", service.url)
    assert done.exit_code == 3
    assert "The order stands" in done.output


def test_replay_tells_a_healthy_run_without_a_warning() -> None:
    done = foreshock("replay", str(TRACE), "--offline")
    assert done.exit_code == 0
    assert "raised" not in done.output
    assert "was played" in done.output


def test_replay_into_a_service_makes_a_run_of_it(service: LiveService) -> None:
    done = foreshock("replay", str(TRACE), "--url", service.url, "--run", "played")
    assert done.exit_code == 0, done.output
    assert httpx.get(f"{service.url}/v1/runs/played", timeout=10).json()["status"] == "completed"


def test_a_trace_that_is_not_there_is_a_sentence() -> None:
    done = foreshock("replay", "nowhere.jsonl.gz", "--offline")
    assert done.exit_code == 1
    assert "there is no trace at nowhere.jsonl.gz" in done.stderr


def test_score_writes_what_it_prints(tmp_path: Path) -> None:
    done = foreshock("lab", "score", str(TRACE), "--report", str(tmp_path / "report.json"))
    assert done.exit_code == 0, done.output
    (trace,) = json.loads((tmp_path / "report.json").read_text())["traces"]
    assert trace["first_warning_step"] is None


@pytest.mark.parametrize(
    ("words", "sentence"), [(["nothing"], "recipe 'nothing'"), (["key-bias", "--arm", "none"], "variant 'none'")]
)
def test_an_unknown_recipe_or_variant_names_the_known_ones(words: list[str], sentence: str) -> None:
    done = foreshock("lab", "run", *words)
    assert done.exit_code == 1
    assert sentence in done.stderr
    assert "allowed are" in done.stderr


def test_serving_other_machines_without_a_token_is_refused_with_the_way_out() -> None:
    done = foreshock("serve", "--host", "0.0.0.0")
    assert done.exit_code == 1
    assert "FORESHOCK_TOKEN" in done.stderr


def test_a_missing_extra_names_the_install_command() -> None:
    """The service's half is hidden from a real process."""
    hide = "import sys; sys.modules['fastapi'] = None; from foreshock.cli.main import app; app(['serve'])"
    done = subprocess.run([sys.executable, "-P", "-c", hide], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install 'foreshock[server]'" in done.stderr


def serve_with(variables: dict[str, str], folder: Path) -> tuple[int, str]:
    """The end of a real `foreshock serve` that cannot start: its exit code and everything it printed."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "foreshock", "serve"],
        env={**os.environ, "FORESHOCK_PORT": "0", **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


HASHED = '{"name": "%s", "sha256": "%s", "scopes": ["read"]}'


@pytest.mark.parametrize(
    ("variables", "words", "secret"),
    [
        ({"FORESHOCK_TOKEN": "horse-staple"}, "FORESHOCK_TOKEN", "horse-staple"),
        ({"FORESHOCK_GRAFANA_HMAC_SECRET": "pepper-salt"}, "FORESHOCK_GRAFANA_HMAC_SECRET", "pepper-salt"),
        (
            {"FORESHOCK_TOKENS": f"[{', '.join([HASHED % ('ann', 'beef' * 16)] * 2)}]", "FORESHOCK_TOKEN": "long" * 5},
            "same name",
            "beefbeef",
        ),
        ({"FORESHOCK_TOKENS": f"[{HASHED % ('ann', 'in-clear-by-mistake')}]"}, "FORESHOCK_TOKENS", "in-clear"),
        ({"FORESHOCK_TOKENS": '[{"name": "cut-off'}, "FORESHOCK_TOKENS", "cut-off"),
        (
            {"FORESHOCK_NOTIFY_SLACK_URL": "https://chat.example/services/T01/B02/tail-of-the-address"},
            "chat.example is not allowed",
            "tail-of",
        ),
        ({"FORESHOCK_NOTIFY_WEBHOOK_URL": "http://[bad/tail-of-the-address"}, "cannot be read", "tail-of"),
        ({"FORESHOCK_TOKEN": "long-enough-secret", "FORESHOCK_RETENTION_SECOND": "9"}, "did you mean", "long-enough"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_at_the_start_is_said_and_no_secret_with_it(
    variables: dict[str, str], words: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = foreshock("serve", "--port", "0")
    said = done.output + done.stderr
    assert done.exit_code == 1
    assert words in said
    assert secret not in said
    assert "Traceback" not in said
    assert "pydantic" not in said, "that is how it was found, not what is wrong"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("postgresql://me:passphrase@127.0.0.1:1/db", "the database cannot be used"),
        ("postgresql://me:passphrase@h:port/db", "FORESHOCK_DATABASE_URL is no address"),
    ],
)
def test_the_password_of_a_database_that_cannot_be_used_is_not_said(address: str, words: str, tmp_path: Path) -> None:
    code, said = serve_with({"FORESHOCK_DATABASE_URL": address}, tmp_path)
    assert code != 0
    assert words in said
    assert "phrase" not in said


def test_a_port_that_is_taken_is_a_sentence_that_says_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = serve_with({"FORESHOCK_PORT": str(port)}, tmp_path)
    assert code != 0
    assert f"port {port} of 127.0.0.1 is taken" in said
    assert "--port" in said
    assert "{" not in said, "no line of the log"


def test_boards_and_rules_are_written_elsewhere_for_other_addresses(tmp_path: Path) -> None:
    addresses = ["--grafana-url", "https://g.example", "--service-url", "https://s.example/"]
    done = foreshock(
        "dashboards", "generate", "--out", str(tmp_path), *addresses, "--runbooks-url", "https://r.example"
    )
    assert done.exit_code == 0, done.output
    rules = (tmp_path / "dashboards/generated/prometheus-rules.yml").read_text()
    assert "https://g.example/d/foreshock-run" in rules
    assert "https://s.example/?runs=" in rules
    assert "runbook_url: https://r.example/ForeshockRunHung.md" in rules
    assert "127.0.0.1" not in rules
    refused = foreshock("dashboards", "generate", *addresses)
    assert refused.exit_code == 1
    assert "--out" in refused.stderr


def test_incidents_are_told_in_words_or_whole_as_json_and_acknowledged(service: LiveService) -> None:
    rank = FakeRank(run="ill", boot="b7")
    post(service, rank.batch(rank.started(), rank.sample(1), rank.verdict(1), rank.verdict(1, head=1, name="warn-2")))
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


LONG = "sweep/2026-11-22/" + "a-very-long-name-" * 6 + "seed-8"


@pytest.fixture(scope="module")
def crowded(service: LiveService) -> LiveService:
    rank = FakeRank(run=LONG, boot="b9")
    post(service, rank.batch(rank.started(), rank.sample(1), rank.sample(2, loss=2.5)))
    return service


def piped(*words: str) -> subprocess.CompletedProcess[str]:
    """A real command whose output goes into a pipe, as in a script."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "foreshock", *words], capture_output=True, text=True, timeout=120, env=environment
    )


def test_a_long_name_stands_whole_in_a_pipe(crowded: LiveService) -> None:
    done = piped("runs", "--url", crowded.url)
    assert done.returncode == 0, done.stderr
    assert LONG in done.stdout


def test_what_runs_says_as_json_is_what_the_service_says(crowded: LiveService) -> None:
    listed = json.loads(foreshock("runs", "--json", "--url", crowded.url).output)
    said = httpx.get(f"{crowded.url}/v1/runs", timeout=10).json()["runs"]
    assert [run["run"] for run in listed] == [run["run"] for run in said]
    shown = json.loads(foreshock("runs", LONG, "--json", "--url", crowded.url).output)
    assert (shown["run"], len(shown["layers"])) == (LONG, 2)


def test_the_list_and_a_curve_are_exported_as_csv(crowded: LiveService) -> None:
    rows = list(csv.DictReader(io.StringIO(foreshock("runs", "--csv", "--url", crowded.url).output)))
    assert {"run-1", LONG} <= {row["run"] for row in rows}
    curve = foreshock("export", LONG, "run.loss", "--url", crowded.url).output
    points = list(csv.DictReader(io.StringIO(curve)))
    assert [(point["step"], point["last"]) for point in points] == [("1", "3.0"), ("2", "2.5")]
    worst = list(
        csv.DictReader(
            io.StringIO(foreshock("export", LONG, "head.score_max", "--layer", "1", "--url", crowded.url).output)
        )
    )
    assert {point["worst_head"] for point in worst} <= {"0.0", "1.0", "2.0"}


WITHOUT_AN_ANSWER = {"serve", "lab run", "lab run-set", "lab corpus", "dashboards check"}
"""Their files and their exit code say it all."""


def leaves(command: Any, *name: str) -> Iterator[tuple[str, set[str]]]:
    """Every command by its whole name, with its options."""
    for part, own in getattr(command, "commands", {}).items():
        yield from leaves(own, *name, part)
    if not hasattr(command, "commands"):
        yield " ".join(name), {option for given in command.params for option in given.opts}


def test_every_command_answers_in_json_whose_shape_is_documented() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    rows = " ".join(line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `"))
    for name, options in leaves(typer.main.get_command(app)):
        if name in WITHOUT_AN_ANSWER:
            assert f"`{name}`" in page
            continue
        assert options & {"--json", "--report"}, name
        group = name.split()[0]
        assert f"`foreshock {name} " in rows or f"`foreshock {group} ... --json" in rows, name


def test_what_is_exported_deleted_and_verified_is_told_as_json_too(tmp_path: Path) -> None:
    def told(*words: str) -> dict[str, Any]:
        done = foreshock(*words, "--json")
        assert done.exit_code == 0, done.output
        return dict(json.loads(done.stdout))

    store = f"sqlite:///{tmp_path}/foreshock.db"
    with LiveService(tmp_path, {"FORESHOCK_DATABASE_URL": store}) as live:
        rank = FakeRank(run="short", layers=2)
        ended = Finished(step=2, unix_seconds=1.0, status="completed")
        post(live, rank.batch(rank.started(), rank.sample(1), rank.sample(2, loss=float("nan")), ended))
        worst = told("export", "short", "head.score_max", "--layer", "1", "--url", live.url)
        assert {point["worst_head"] in (0, 1, 2) for point in worst["points"]} == {True}
        assert told("export", "short", "run.loss", "--url", live.url) == {
            "run": "short",
            "metric": "run.loss",
            "layer": None,
            "head": None,
            "points": [
                {"step": 1, "low": 3.0, "high": 3.0, "last": 3.0},
                {"step": 2, "low": None, "high": None, "last": None},
            ],
        }
        asked = CliRunner().invoke(app, ["delete", "short", "--reason", "x", "--json", "--url", live.url], input="n\n")
        assert asked.exit_code == 1
        assert "It cannot be taken back" in asked.stderr
        assert "It cannot be taken back" not in asked.stdout
        gone = told("delete", "short", "--reason", "a try", "--yes", "--url", live.url)
        assert gone == {"deleted": "short", "last_step": 2}
        trail = tmp_path / "trail.jsonl"
        first = told("audit", "export", str(trail), "--url", live.url)
    assert first["appended"] == first["rows"] == len(trail.read_text().splitlines()) > 0
    assert told("audit", "verify", str(trail)) == {"file": str(trail), "rows": first["rows"], "hash": first["hash"]}
    copy = tmp_path / "copy.db"
    saved = told("store", "backup", str(copy), "--database-url", store)
    assert saved == {"file": str(copy), "bytes": copy.stat().st_size}
    held = told("store", "check", "--database-url", store)
    assert held == {"runs": 0, "batches": 0, "audit_rows": first["rows"]}
    assert told("store", "restore", str(copy), "--database-url", f"sqlite:///{tmp_path}/again.db") == held


def test_a_checkup_the_recipes_and_a_replay_are_told_as_json() -> None:
    examined = foreshock("doctor", "--json", "--url", "http://127.0.0.1:9")
    assert {finding["what"] for finding in json.loads(examined.output)} >= {"foreshock", "service"}
    recipes = json.loads(foreshock("lab", "recipes", "--json").output)
    assert "key-bias" in {recipe["name"] for recipe in recipes["recipes"]}
    [run] = json.loads(foreshock("lab", "compare", str(TRACE), "--json").output)["runs"]
    assert (run["recipe"], run["excess"], run["first_warning"]) == ("key-bias_batch32", None, None)
    played = foreshock("replay", str(TRACE), "--offline", "--json").output.splitlines()
    assert json.loads(played[-1]) == {"kind": "played", "trace": TRACE.name, "run": None, "url": None}


@pytest.mark.parametrize(("outcome", "code"), [("applied", 0), ("refused", 4), (None, 3)])
def test_the_exit_code_tells_ordered_from_answered(service: LiveService, outcome: Outcome | None, code: int) -> None:
    rank = FakeRank(run=f"codes-{code}", boot="b3")
    post(service, rank.batch(rank.started(), rank.sample(1)))
    over = threading.Event()

    def agent() -> None:
        step = 1
        while not over.wait(0.1):
            step += 1
            for command in post(service, rank.batch(rank.sample(step))).commands:
                if outcome is not None:
                    post(service, rank.batch(rank.answer(command, step, outcome)))

    thread = threading.Thread(target=agent)
    thread.start()
    try:
        order = ["--mode", "exact_delta", "--reason", "a script", "--wait", "30" if outcome else "0.5", "--json"]
        done = foreshock("switch", rank.run, *order, "--url", service.url)
    finally:
        over.set()
        thread.join()
    assert done.exit_code == code, done.output
    [command] = json.loads(done.output)["commands"]
    assert command["state"] == {0: "applied", 4: "refused", 3: "delivered"}[code]


def test_no_token_and_a_wrong_one_read_differently(tmp_path: Path) -> None:
    with LiveService(tmp_path, {"FORESHOCK_TOKEN": "the-right-one-of-all"}) as live:
        none = foreshock("runs", "--url", live.url)
        wrong = foreshock("runs", "--url", live.url, "--token", "not-the-right-one-at-all")
    assert none.exit_code == wrong.exit_code == 1
    assert "needs a token" in none.stderr
    assert "give a token with --token" in none.stderr
    assert "does not know the token" in wrong.stderr
    assert "needs a token" not in wrong.stderr
    assert "not-the-right-one" not in wrong.stderr


@pytest.mark.parametrize(
    "spoil", [lambda whole: b"no trace at all\n", lambda whole: whole[: len(whole) // 2]], ids=["text", "cut off"]
)
def test_replay_looks_at_the_file_before_it_starts_a_service(
    spoil: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a service was started for a file that is no trace")

    monkeypatch.setattr("foreshock.cli.laboratory.local_service", started)
    bad = tmp_path / "bad.jsonl.gz"
    bad.write_bytes(spoil(TRACE.read_bytes()))
    done = foreshock("replay", str(bad), "--port", "0")
    assert done.exit_code == 1
    assert "bad.jsonl.gz" in done.stderr


def test_a_shell_can_complete_commands() -> None:
    assert "--install-completion" in foreshock("--help").output
    asked = {**os.environ, "_FORESHOCK_COMPLETE": "complete_bash", "COMP_WORDS": "foreshock ru", "COMP_CWORD": "1"}
    script = "from foreshock.cli.main import app; app(prog_name='foreshock')"
    done = subprocess.run([sys.executable, "-P", "-c", script], env=asked, capture_output=True, text=True, timeout=60)
    assert "runs" in done.stdout


def test_what_people_keep_of_a_run_is_added_replaced_and_taken_away(service: LiveService) -> None:
    rank = FakeRank(run="kept")
    post(service, rank.batch(rank.started()))

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
    post(service, rank.batch(rank.started(), rank.sample(1)))
    words = ("delete", "to-delete", "--reason", "a rehearsal", "--url", service.url)
    refused = foreshock(*words, "--yes")
    assert refused.exit_code == 1, refused.output
    post(service, rank.batch(Finished(step=1, unix_seconds=2.0, status="completed")))
    unsure = CliRunner().invoke(app, list(words), input="n\n")
    assert unsure.exit_code == 1
    assert "to-delete" in foreshock("runs", "--url", service.url).output
    assert "is deleted" in CliRunner().invoke(app, list(words), input="y\n").output
    assert "to-delete" not in foreshock("runs", "--url", service.url).output
