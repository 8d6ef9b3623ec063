"""`foreshock bench`: each command hands what was typed to one benchmark, and what needs a GPU says so without one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.typed import foreshock

from foreshock.benchmarks import (
    agent_step,
    attention,
    ingest,
)
from foreshock.cli.research.benchmarks import bench

F = Path("f.json")


@pytest.mark.parametrize(
    ("words", "module", "args", "options"),
    [
        ("attention --json f.json --repeats 4", attention, (F, 4), {"modes": False}),
        ("attention", attention, (None, 15), {"modes": False}),
        ("attention --modes --json f.json --repeats 7", attention, (F, 7), {"modes": True}),
        ("agent --rounds 2 --shape llama-1b", agent_step, (None, 2, "llama-1b", agent_step.WATCHED), {}),
        ("ingest --seconds 3", ingest, (None,), {"seconds": 3.0, "database_url": None}),
    ],
)
def test_what_was_typed_reaches_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, words: str, module: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    called: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(module, "main", lambda *a, **k: called.append((a, k)))
    done = foreshock("bench", *words.split())
    assert (done.exit_code, called) == (0, [(args, options)]), done.output


def test_every_benchmark_is_listed_with_a_sentence() -> None:
    help_text = foreshock("bench").output
    names = [command.name for command in bench.registered_commands]
    assert len(names) == 3
    assert all(name is not None and name in help_text for name in names)


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
