"""`foreshock lab`: what was typed reaches the laboratory, and names that do not exist are told with those that do."""

import json
from pathlib import Path

import pytest
from tests.cli.typed import TRACE, foreshock


def test_score_writes_what_it_prints(tmp_path: Path) -> None:
    done = foreshock("lab", "score", str(TRACE), "--report", str(tmp_path / "report.json"))
    assert done.exit_code == 0, done.output
    (trace,) = json.loads((tmp_path / "report.json").read_text())["traces"]
    assert trace["first_warning_step"] is None


@pytest.mark.parametrize(
    ("words", "sentence"), [(["nothing"], "recipe 'nothing'"), (["kb256", "--variant", "none"], "variant 'none'")]
)
def test_an_unknown_recipe_or_variant_names_the_known_ones(words: list[str], sentence: str) -> None:
    done = foreshock("lab", "run", *words)
    assert done.exit_code == 1
    assert sentence in done.stderr
    assert "allowed are" in done.stderr
