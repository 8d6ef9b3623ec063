"""Scores of the published runs match the documents, without a GPU: a changed threshold must change the page."""

import json
from pathlib import Path
from typing import Any

import pytest

from foreshock.lab.recording.trace import read_trace, readings
from foreshock.lab.scoring.score import lab_score, score_traces
from foreshock.monitor.detect.detectors import DetectorConfig, Detectors

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "src/foreshock/lab/traces"
EVIDENCE = (ROOT / "docs" / "evidence.md").read_text()
HEALTHY = ("text-gpt-muon_untreated_seed1", "text-narrow-no-bias_untreated_seed1", "text-gpt_untreated_seed1")
FAILING = ("kb256_untreated_seed1", "kb256_untreated_seed2", "kb256b128_untreated_seed1", "kb256b128_untreated_seed2")


def first_warnings(folder: str, names: tuple[str, ...], config: DetectorConfig) -> list[int | None]:
    traces = [read_trace(TRACES / folder / f"{name}.trace.xz") for name in names]
    return [score.first_warning_step for score in score_traces(traces, config)]


def cells(row: dict[str, Any]) -> str:
    """The table row of one monitor, as on the page."""
    lead = "-" if row["median_lead"] is None else f"{row['median_lead']:,.0f} ({row['least_lead']:,})"
    others, healthy = f"{row['others_warned']} of {row['others']}", f"{row['healthy_warned']} of {row['healthy']}"
    return f"| {row['monitor']} | {row['warned']} of {row['dangerous']} | {lead} | {others} | {healthy} |"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("real-text", ["real-text/*.xz"]),
        ("vendor", ["vendor/*.xz", "vendor/healthy/*.xz"]),
        ("paper", ["paper/*.xz"]),
        ("qk-clip", ["qk-clip/*.xz"]),
        ("cure controls", ["cure/*_control*.xz"]),
        ("made fast", ["*.xz"]),
    ],
)
def test_evidence_page_matches_the_scores_of_every_monitor(name: str, patterns: list[str]) -> None:
    _, result = lab_score([path for pattern in patterns for path in sorted(TRACES.glob(pattern))])
    for row in result["table"]:
        assert "z-score" in row["monitor"] or f"| {name} {cells(row)}" in EVIDENCE  # README has a z-score row
    for group in result["healthy"][:-1]:
        assert f"{group['steps']:,} of {name}" in EVIDENCE
    if name == "real-text":
        precision = result["precision"]
        assert (
            f"{precision['warned_as_rounding']} runs were first warned about as rounding, and {precision['failed']} of"
            in EVIDENCE
        )
        stored = json.loads((ROOT / "src/foreshock/benchmarks/results/monitors.json").read_text())
        assert stored["table"] == result["table"]


@pytest.mark.full
def test_horizon_prevents_warnings_of_healthy_text_runs_but_not_of_failing_runs() -> None:
    assert first_warnings("real-text", HEALTHY, DetectorConfig()) == [None, None, None]
    assert any(first_warnings("real-text", HEALTHY, DetectorConfig(horizon_windows=None)))
    assert None not in first_warnings("cure", FAILING, DetectorConfig())


def test_rounding_is_not_named_if_a_critical_heads_delta_bias_does_not_support_it() -> None:
    trace = read_trace(TRACES / "matrix" / "score-growth-by-Muon_qk_clip-start_seed4.trace.xz")
    detectors = Detectors(trace.heads)
    assert {verdict.cause for sample in readings(trace) for verdict in detectors.update(sample)} == {"score growth"}
