"""The attention benchmark: modes are compared with plain heads, and unsupported backends have no ratio."""

import json
from pathlib import Path

import pytest

from foreshock.benchmarks.attention import Shape, Stopwatch, Timed, ratios, run
from foreshock.contract.modes import MODES


class FakeStopwatch(Stopwatch):
    """Makes every call once, and reports n times half a millisecond for the n-th call."""

    def __init__(self) -> None:
        self.timed: list[list[str]] = []

    def medians(self, calls: dict[str, Timed]) -> dict[str, float]:
        self.timed.append(list(calls))
        for prepare, call in calls.values():
            prepare()
            call()
        return {name: 0.5 * number for number, name in enumerate(calls, start=1)}


def test_every_mode_is_timed_with_plain_heads_and_printed_with_its_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mode_names = [mode.name for mode in MODES]
    stopwatch, file = FakeStopwatch(), tmp_path / "modes.json"
    shapes = [Shape(8, 2, 2, 16, True), Shape(4, 2, 1, 32, False)]
    run(stopwatch, file, {"command": "this one"}, shapes, modes=True, device="cpu")
    assert stopwatch.timed == [["plain", *mode_names]] * 4, (
        "cuDNN does not support CPUs; all other calls are timed in one run"
    )
    result = json.loads(file.read_text())
    assert result["command"] == "this one"
    keys = ("head_dim", "causal", "pass")
    assert [tuple(cell[key] for key in keys) for cell in result["cells"]] == [
        (dim, causal, direction) for dim, causal in ((8, True), (4, False)) for direction in ("backward", "both")
    ]
    captured = capsys.readouterr()
    first, *_ = captured.out.splitlines()
    listed = ", ".join(f"{name} {number / 2:.3f} ({number:.2f})" for number, name in enumerate(mode_names, start=2))
    assert first == f"D 8, 2/2 heads, S 16, causal, backward: plain 0.500, {listed}, sdpa_cudnn -"
    assert "sdpa_cudnn does not take" in captured.err


def test_ratios_average_sequences_of_2048_tokens_or_more_and_skip_missing_times() -> None:
    cells = [
        {"head_dim": dim, "seq_len": length, "pass": "both", "milliseconds": {"plain": 2.0, "exact": taken}}
        for dim, length, taken in ((64, 1024, 90.0), (64, 2048, 2.0), (64, 4096, 8.0), (128, 2048, None))
    ]
    assert ratios(cells, "plain") == {"D 64 both exact": {"mean": 2.0, "least": 1.0, "most": 4.0}}
