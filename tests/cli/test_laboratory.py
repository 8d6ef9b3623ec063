"""Recorded runs and recipes at the command line; names that do not exist are refused with those that do."""

import json
from pathlib import Path

import httpx
import pytest
from tests.cli.typed import TRACE, foreshock

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
    assert "key-bias" in foreshock("lab", "recipes").output
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
