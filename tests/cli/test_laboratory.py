"""Recorded runs, recipes, scores and benchmarks at the command line, and names that do not exist."""

import dataclasses
import json
from io import StringIO
from pathlib import Path

import httpx
import pytest
import torch
from rich.console import Console
from tests.cli.typed import TRACE, foreshock

from foreshock.cli.output import cell
from foreshock.cli.research import scores
from foreshock.lab.scoring.synthetic import Row
from foreshock.server.testing import LiveService


def test_a_replay_says_whether_any_head_was_warned_about_also_as_json() -> None:
    done = foreshock("replay", str(TRACE), "--offline")
    assert done.exit_code == 0
    assert "raised" not in done.output
    assert f"{TRACE.name} was played: no head was warned about." in done.output
    failing = foreshock("replay", str(TRACE.with_name("key-bias_fa2_batch32.trace.xz")), "--offline")
    assert "raised" in failing.output
    assert "was played." in failing.output
    played = foreshock("replay", str(TRACE), "--offline", "--json").output.splitlines()
    assert json.loads(played[-1]) == {"kind": "played", "trace": TRACE.name, "run": None, "url": None}


def test_replay_into_a_service_makes_a_run_of_it(service: LiveService) -> None:
    done = foreshock("replay", str(TRACE), "--url", service.url, "--run", "played")
    assert f"Live page: {service.url}/?runs=played\n" in done.output
    assert done.exit_code == 0, done.output
    assert httpx.get(f"{service.url}/v1/runs/played", timeout=10).json()["status"] == "completed"


@pytest.mark.parametrize(
    ("words", "sentence"), [(["nothing"], "recipe 'nothing'"), (["kb256", "--variant", "none"], "variant 'none'")]
)
def test_an_unknown_recipe_or_variant_names_the_known_ones(words: list[str], sentence: str) -> None:
    done = foreshock("lab", "run", *words)
    assert done.exit_code == 1
    assert sentence in done.stderr
    assert "allowed are" in done.stderr


@pytest.mark.parametrize("kept", [None, b"no trace at all\n", TRACE.read_bytes()[:15_000]], ids=["gone", "text", "cut"])
def test_replay_looks_at_the_file_before_it_starts_a_service(
    kept: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a service was started for a file that is no trace")

    monkeypatch.setattr("foreshock.lab.shown.page.own_page", started)
    bad = tmp_path / "bad.jsonl.gz"
    if kept is not None:
        bad.write_bytes(kept)
    done = foreshock("replay", str(bad), "--port", "0")
    assert done.exit_code == 1
    assert "bad.jsonl.gz" in done.stderr


@pytest.mark.parametrize("width", [80, 240])
def test_the_tables_are_those_of_the_report_in_a_terminal_of_any_width(width: int, tmp_path: Path) -> None:
    traces, out = [TRACE.with_name("key-bias_fa2_batch32.trace.xz"), TRACE], StringIO()
    console = Console(file=out, width=width, force_terminal=False)
    scores.score(traces, console, report=tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert [each["first_warning_step"] is None for each in report["traces"]] == [False, True]
    for each in report["traces"]:
        words = (each["trace"], each["truth"], each["steps"], each["first_warning_step"], each["layer"])
        assert [line for line in lines if line.startswith(" ".join(map(cell, words)))]
    for rows in (report["table"], report["healthy"], [report["precision"]], [report["forecasts"]]):
        for row in rows:
            assert " ".join(map(cell, row.values())) in lines
    assert "…" not in out.getvalue()
    assert f"report: {tmp_path / 'report.json'}" in out.getvalue().replace("\n", "")


def test_the_command_takes_recorded_runs_or_made_up_ones() -> None:
    assert foreshock("lab", "score").exit_code == 2
    assert foreshock("lab", "score", str(TRACE), "--synthetic").exit_code == 2


def test_the_rows_of_made_up_runs_are_printed_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(family="one head", truth="failing", tuned=True, runs=3, warned=2, median_lead=40.0)
    monkeypatch.setattr("foreshock.lab.scoring.synthetic.score_synthetic", lambda: iter([row]))
    done = foreshock("lab", "score", "--synthetic", "--report", str(tmp_path / "rows.json"))
    assert done.exit_code == 0
    assert "one head failing True 3 2 0 40 - 0" in " ".join(done.output.split())
    assert json.loads((tmp_path / "rows.json").read_text()) == [dataclasses.asdict(row)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the benchmarks run, for minutes")
@pytest.mark.parametrize("words", ["attention", "attention --modes", "agent"])
def test_what_needs_a_gpu_says_so_without_one_and_writes_nothing(words: str, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    done = foreshock("bench", *words.split(), "--json", str(file))
    assert done.exit_code == 1
    assert "needs a CUDA GPU" in done.output + done.stderr
    assert "Traceback" not in done.output + done.stderr
    assert not file.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("attention", "--repeats", "1"),
        ("ingest", "--seconds", "0"),
        ("pages",),
    ],
)
def test_a_number_that_measures_nothing_and_a_name_that_is_none_are_refused(words: tuple[str, ...]) -> None:
    assert foreshock("bench", *words).exit_code == 2
