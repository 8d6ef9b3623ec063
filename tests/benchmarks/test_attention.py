"""The tables of the benchmark of attention: who refused has no ratio, and modes are timed beside plain heads."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from foreshock.benchmarks.attention import Shape, markdown, mode_costs, run
from foreshock.benchmarks.stopwatch import PASSES, Stopwatch
from foreshock.contract.modes import MODES


def test_a_peer_that_was_not_timed_has_no_column_and_one_that_refused_has_no_ratio() -> None:
    cells: list[dict[str, Any]] = [
        asdict(Shape(64, 2, 1, 16384, causal=False))
        | {"pass": which, "foreshock": 1.0, "sdpa_cudnn": None, "flex": 1.5}
        for which in PASSES
    ]
    first, _, last = markdown(cells).splitlines()
    assert first.startswith("| D, heads | mask | S | forward | / cuDNN / flex | backward |")
    assert last == (
        "| 64, 2/1 | full | 16384 | 1.000 (137) | - / 1.50 | 1.000 (344) | - / 1.50 | 1.000 (481) | - / 1.50 |"
    )


class Fake(Stopwatch):
    """Makes every call once, and says that the n-th of them took n times half a millisecond."""

    def __init__(self) -> None:
        self.timed: list[list[str]] = []

    def medians(self, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
        self.timed.append(list(calls))
        for call in calls.values():
            if (prepare := getattr(call, "prepare", None)) is not None:
                prepare()
            call()
        return {name: 0.5 * number for number, name in enumerate(calls, start=1)}


def test_every_mode_is_timed_in_turn_with_plain_heads_and_the_table_has_its_ratio_to_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offered = [mode.name for mode in MODES]
    stopwatch, file = Fake(), tmp_path / "modes.json"
    shapes = [Shape(8, 2, 2, 16, True), Shape(4, 2, 1, 32, False)]
    run(stopwatch, file, {"command": "this one"}, shapes, modes=True, device="cpu")
    assert stopwatch.timed == [["plain", *offered]] * 4, "cuDNN refuses a CPU; all else is timed in one run"
    result = json.loads(file.read_text())
    assert result["command"] == "this one"
    keys = ("head_dim", "causal", "pass")
    assert [tuple(cell[key] for key in keys) for cell in result["cells"]] == [
        (dim, causal, which) for dim, causal in ((8, True), (4, False)) for which in ("backward", "both")
    ]
    said = capsys.readouterr()
    head, _, line, _ = said.out.splitlines()
    assert [name.strip() for name in head.split(" | ")[4].split("/")[1:]] == [*offered, "cuDNN"]
    ratios = [*(f"{number:.2f}" for number in range(2, len(offered) + 2)), "-"]
    assert line.split(" | ")[4] == " / ".join(ratios)
    assert "sdpa_cudnn does not take" in said.err


def test_the_cost_of_a_mode_is_its_mean_from_two_thousand_tokens_on_without_what_was_refused() -> None:
    first = next(mode.name for mode in MODES)
    cells = [
        {"head_dim": dim, "seq_len": length, "pass": "both", "plain": 2.0, first: taken}
        for dim, length, taken in ((64, 1024, 90.0), (64, 2048, 2.0), (64, 4096, 8.0), (128, 2048, None))
    ]
    assert mode_costs(cells) == {f"D 64 both {first} mean": 2.0, f"D 64 both {first} worst": 4.0}
