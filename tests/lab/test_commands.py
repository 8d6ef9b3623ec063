"""The laboratory's commands, as a person sees them."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from foreshock.lab import commands
from foreshock.lab.trace import read_trace

TRACES = Path(__file__).parents[2] / "lab" / "traces"


def test_a_replay_brings_its_own_service_and_tells_the_warning_and_the_page() -> None:
    said = io.StringIO()
    commands.replay(
        TRACES / "key-bias_fa2_batch32.jsonl.gz", port=0, run="played", console=Console(file=said, width=300)
    )
    assert "raised   Layer 0 head 0 drifts" in said.getvalue()
    assert "/?runs=played" in said.getvalue()


def test_scores_are_shown_one_line_for_each_trace() -> None:
    said = io.StringIO()
    scores = commands.score([TRACES / "key-bias_fp32_batch32.jsonl.gz"], console=Console(file=said, width=200))
    assert scores[0].first_warning_step is None
    assert "quiet" in said.getvalue()


def test_a_run_writes_its_trace_where_it_is_told(tmp_path: Path) -> None:
    path = commands.run(
        "key-bias-small", seed=2, steps=3, trace=tmp_path / "t.jsonl.gz", console=Console(file=io.StringIO())
    )
    assert read_trace(path).samples[-1].step == 3


def test_an_unknown_recipe_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="recipe 'x' does not exist; allowed are key-bias-small, key-bias"):
        commands.run("x")
