"""`foreshock lab`: what was typed reaches the laboratory, and names that do not exist are told with those that do."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.typed import TRACE, foreshock

from foreshock.cli.research.lab import lab


def test_score_writes_what_it_prints(tmp_path: Path) -> None:
    done = foreshock("lab", "score", str(TRACE), "--report", str(tmp_path / "report.json"))
    assert done.exit_code == 0, done.output
    (trace,) = json.loads((tmp_path / "report.json").read_text())["traces"]
    assert trace["first_warning_step"] is None


@pytest.mark.parametrize(
    ("words", "sentence"), [(["nothing"], "recipe 'nothing'"), (["key-bias", "--variant", "none"], "variant 'none'")]
)
def test_an_unknown_recipe_or_variant_names_the_known_ones(words: list[str], sentence: str) -> None:
    done = foreshock("lab", "run", *words)
    assert done.exit_code == 1
    assert sentence in done.stderr
    assert "allowed are" in done.stderr


@pytest.mark.parametrize(
    ("words", "where", "options"),
    [
        (
            "run kb256 --folder f --resume --minutes 9 --url http://127.0.0.1:8765",
            "laboratory.run",
            {
                "variant_name": "untreated",
                "seed": 0,
                "steps": None,
                "url": "http://127.0.0.1:8765",
                "folder": Path("f"),
                "resume": True,
                "minutes": 9.0,
                "branch_from": None,
            },
        ),
        ("score t.jsonl.gz --report r.json", "scores.score", {"report": Path("r.json")}),
    ],
)
def test_what_was_typed_reaches_the_laboratory(
    monkeypatch: pytest.MonkeyPatch, words: str, where: str, options: dict[str, Any]
) -> None:
    called: list[dict[str, Any]] = []
    monkeypatch.setattr(f"foreshock.cli.research.{where}", lambda *_, **given: called.append(given))
    done = foreshock("lab", *words.split())
    assert (done.exit_code, called) == (0, [options]), done.output + done.stderr


def test_every_command_is_listed_with_a_sentence() -> None:
    shown = foreshock("lab").output
    names = [command.name for command in lab.registered_commands]
    assert len(names) >= 4
    assert all(name is not None and name in shown for name in names)
