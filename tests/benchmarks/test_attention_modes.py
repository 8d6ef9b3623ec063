"""What the modes cost: every mode that is offered is timed in turn with plain heads and the peer, and compared."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from foreshock.benchmarks import attention, attention_modes, machine
from foreshock.benchmarks.attention import Shape
from foreshock.benchmarks.stopwatch import Stopwatch
from foreshock.contract.modes import MODES

OFFERED = [mode.name for mode in MODES]
SMALL = [Shape(8, 2, 2, 16, True), Shape(4, 2, 1, 32, False)]


class Fake(Stopwatch):
    """Makes every call once, and says that the n-th of them took n times `unit` milliseconds."""

    def __init__(self, unit: float) -> None:
        self.repeats, self.unit = 3, unit
        self.timed: list[list[str]] = []

    def medians(self, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
        self.timed.append(list(calls))
        for call in calls.values():
            if (prepare := getattr(call, "prepare", None)) is not None:
                prepare()
            call()
        return {name: self.unit * (number + 1) for number, name in enumerate(calls)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TOKENS", 32)
    monkeypatch.setattr(attention_modes, "SHAPES", SMALL)
    monkeypatch.setattr(machine, "gpu", lambda: {"commit": "abc", "clocks": {"driver_version": "1"}})


@pytest.mark.usefixtures("small")
def test_every_mode_is_timed_in_turn_with_plain_heads_and_each_ratio_is_to_them(tmp_path: Path) -> None:
    stopwatch, file = Fake(0.5), tmp_path / "modes.json"
    attention_modes.run(stopwatch, file, device="cpu")
    assert stopwatch.timed == [["plain", *OFFERED]] * 4, "cuDNN refuses a CPU; all else is timed in one run"
    result = json.loads(file.read_text())
    assert result["command"] == "foreshock bench attention --modes --repeats 3 --json modes.json"
    assert (result["commit"], result["clocks"]) == ("abc", {"driver_version": "1"})
    keys = ("head_dim", "heads", "kv_heads", "seq_len", "causal", "pass")
    assert [tuple(cell[key] for key in keys) for cell in result["cells"]] == [
        (8, 2, 2, 16, True, "backward"),
        (8, 2, 2, 16, True, "both"),
        (4, 2, 1, 32, False, "backward"),
        (4, 2, 1, 32, False, "both"),
    ]
    for cell in result["cells"]:
        assert cell["plain"] == 0.5
        assert cell["ratio_to_plain"] == {name: 2.0 + n for n, name in enumerate(OFFERED)} | {"sdpa_cudnn": None}


def test_the_summary_is_of_each_head_dim_and_pass_from_two_thousand_tokens_on_and_leaves_out_what_was_refused() -> None:
    def cell(head_dim: int, seq_len: int, first: float | None) -> dict[str, object]:
        ratios = dict.fromkeys(attention_modes.RATIOS) | {OFFERED[0]: first}
        return {"head_dim": head_dim, "seq_len": seq_len, "pass": "both", "ratio_to_plain": ratios}

    cells = [cell(64, 1024, 90.0), cell(64, 2048, 1.0), cell(64, 4096, 4.0), cell(128, 2048, None)]
    assert attention_modes.summary(cells) == [
        {"head_dim": 64, "pass": "both", "name": OFFERED[0], "mean_ratio": 2.0, "worst_ratio": 4.0}
    ]


@pytest.mark.usefixtures("small")
def test_each_ratio_stands_in_a_column_of_its_mode_and_what_was_refused_is_a_dash(
    capsys: pytest.CaptureFixture[str],
) -> None:
    attention_modes.run(Fake(2.0), None, device="cpu")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-1] == "sdpa_cudnn"
    assert lines[1].split()[4:7] == ["2.000", "2.000", "3.000"]
    assert lines[1].split()[-1] == "-"


def test_the_shapes_are_both_head_dims_at_three_causal_lengths_and_a_full_one() -> None:
    shapes = {(s.head_dim, s.seq_len, s.causal) for s in attention_modes.SHAPES}
    lengths = ((1024, True), (2048, True), (8192, True), (4096, False))
    assert shapes == {(dim, *length) for dim in (64, 128) for length in lengths}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        attention_modes.main()
