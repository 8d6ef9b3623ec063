"""The commands `replay`, `lab` and `bench`, and their errors for unknown names."""

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
from foreshock.cli.research.lab import print_scores
from foreshock.lab.scoring.synthetic import Row
from foreshock.server.testing import LiveService


def test_offline_replay_reports_warnings_as_text_and_json() -> None:
    done = foreshock("replay", str(TRACE), "--offline")
    assert done.exit_code == 0
    assert "raised" not in done.output
    assert f"{TRACE.name} was played: no head was warned about." in done.output
    failing = foreshock("replay", str(TRACE.with_name("key-bias_fa2_batch32.trace.xz")), "--offline")
    assert "raised" in failing.output
    assert "was played." in failing.output
    played = foreshock("replay", str(TRACE), "--offline", "--json").output.splitlines()
    assert json.loads(played[-1]) == {"kind": "played", "trace": TRACE.name, "run": None, "url": None}


def test_replay_into_a_service_creates_a_run(service: LiveService) -> None:
    done = foreshock("replay", str(TRACE), "--url", service.url, "--run", "played")
    assert f"Live page: {service.url}/?runs=played\n" in done.output
    assert done.exit_code == 0, done.output
    assert httpx.get(f"{service.url}/v1/runs/played", timeout=10).json()["status"] == "completed"


@pytest.mark.parametrize(
    ("arguments", "sentence"), [(["nothing"], "recipe 'nothing'"), (["kb256", "--variant", "none"], "variant 'none'")]
)
def test_unknown_recipe_or_variant_is_rejected_with_the_allowed_names(arguments: list[str], sentence: str) -> None:
    done = foreshock("lab", "run", *arguments)
    assert done.exit_code == 1
    assert sentence in done.stderr
    assert "allowed are" in done.stderr


@pytest.mark.parametrize(
    "content", [None, b"no trace at all\n", TRACE.read_bytes()[:15_000]], ids=["missing", "text", "cut"]
)
def test_replay_validates_the_trace_before_starting_a_service(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_on_start(*_: object) -> None:
        raise AssertionError("a service was started although the file is not a trace")

    monkeypatch.setattr("foreshock.lab.shown.page.own_page", fail_on_start)
    trace = tmp_path / "bad.jsonl.gz"
    if content is not None:
        trace.write_bytes(content)
    done = foreshock("replay", str(trace), "--port", "0")
    assert done.exit_code == 1
    assert "bad.jsonl.gz" in done.stderr


@pytest.mark.parametrize("width", [80, 240])
def test_score_tables_match_the_report_at_any_terminal_width(width: int, tmp_path: Path) -> None:
    traces, out = [TRACE.with_name("key-bias_fa2_batch32.trace.xz"), TRACE], StringIO()
    console = Console(file=out, width=width, force_terminal=False)
    print_scores(traces, console, report=tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert [trace["first_warning_step"] is None for trace in report["traces"]] == [False, True]
    for trace in report["traces"]:
        cells = (trace["trace"], trace["truth"], trace["steps"], trace["first_warning_step"], trace["layer"])
        assert [line for line in lines if line.startswith(" ".join(map(cell, cells)))]
    for rows in (report["table"], report["healthy"], [report["precision"]], [report["forecasts"]]):
        for row in rows:
            assert " ".join(map(cell, row.values())) in lines
    assert "…" not in out.getvalue()
    assert f"report: {tmp_path / 'report.json'}" in out.getvalue().replace("\n", "")


def test_score_requires_either_traces_or_synthetic() -> None:
    assert foreshock("lab", "score").exit_code == 2
    assert foreshock("lab", "score", str(TRACE), "--synthetic").exit_code == 2


def test_synthetic_scores_are_printed_and_written_to_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row(family="one head", truth="failing", tuned=True, runs=3, warned=2, median_lead=40.0)
    monkeypatch.setattr("foreshock.lab.scoring.synthetic.score_synthetic", lambda: iter([row]))
    done = foreshock("lab", "score", "--synthetic", "--report", str(tmp_path / "rows.json"))
    assert done.exit_code == 0
    assert "one head failing True 3 2 0 40 - 0" in " ".join(done.output.split())
    assert json.loads((tmp_path / "rows.json").read_text()) == [dataclasses.asdict(row)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmarks run for minutes")
@pytest.mark.parametrize("arguments", ["attention", "attention --modes", "agent"])
def test_gpu_benchmark_without_a_gpu_fails_and_writes_nothing(arguments: str, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    done = foreshock("bench", *arguments.split(), "--json", str(file))
    assert done.exit_code == 1
    assert "needs a CUDA GPU" in done.output + done.stderr
    assert "Traceback" not in done.output + done.stderr
    assert not file.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("attention", "--repeats", "1"),
        ("ingest", "--seconds", "0"),
        ("pages",),
    ],
)
def test_bench_rejects_invalid_numbers_and_unknown_names(arguments: tuple[str, ...]) -> None:
    assert foreshock("bench", *arguments).exit_code == 2
