"""`foreshock bench`: each command hands what was typed to one benchmark, and what needs a GPU says so without one."""

from pathlib import Path

import pytest
import torch
from tests.cli.typed import foreshock


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
