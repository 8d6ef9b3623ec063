"""The measured tables: every cell of the grid is kept, and the README shows them as they were measured."""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from foreshock.benchmarks.attention import Shape, grid, markdown, mode_costs, run, summary
from foreshock.benchmarks.stopwatch import PASSES, Stopwatch
from foreshock.contract.modes import MODES

ROOT = Path(__file__).parents[2]
RESULT, TIES, GROUPED = (
    json.loads((ROOT / f"src/foreshock/benchmarks/results/{name}.json").read_text())
    for name in ("attention_h200", "attention_hopper_h200", "hopper_grouped_h100")
)
PAGE = (ROOT / "src/foreshock/lab/NOTEBOOK.md").read_text()


def test_every_cell_of_the_grid_is_kept_with_every_contender() -> None:
    keys = ("head_dim", "heads", "kv_heads", "seq_len", "causal", "pass")
    kept = [tuple(cell[key] for key in keys) for cell in RESULT["cells"]]
    wanted = [(s.head_dim, s.heads, s.kv_heads, s.seq_len, s.causal, which) for s in grid() for which in PASSES]
    assert kept == wanted
    for cell in RESULT["cells"]:
        for name in ("foreshock", "foreshock_plain", "sdpa_flash", "sdpa_cudnn", "flex"):
            assert 0 < cell[name] < 1000


def test_the_notebook_shows_the_table_and_the_summary_follows_from_the_cells() -> None:
    shown = [c for c in RESULT["cells"] if c["seq_len"] in (1024, 4096, 16384) or c["kv_heads"] != c["heads"]]
    assert markdown(shown) in PAGE
    told = summary(RESULT["cells"])
    assert told == pytest.approx({name: RESULT["summary"][name] for name in told})


def test_what_the_notebook_says_beside_cudnn_and_of_statistics_follows_from_the_cells() -> None:
    found = summary(RESULT["cells"])

    def beside(which: str) -> str:
        return " and ".join(f"{found[f'{which}_{name}_ratio_to_sdpa_cudnn']:.2f}" for name in ("mean", "least"))

    assert f"forward {beside('forward')} (aims" in PAGE
    assert f"backward {beside('backward')} (aims" in PAGE
    assert f"both {beside('both')}. " in PAGE
    others = summary([c for c in RESULT["cells"] if c["kv_heads"] == c["heads"] or c["head_dim"] == 64])
    assert f"Without grouped heads of D 128 the least is {others['backward_least_ratio_to_sdpa_cudnn']:.2f}." in PAGE
    cost, worst = (100 * found[f"statistics_cost{name}"] for name in ("", "_worst_cell"))
    assert f"add {cost:.1f} % to both passes from S = 2048 on without grouped heads (worst {worst:.1f})" in PAGE


def test_what_the_notebook_says_of_shared_key_heads_follows_from_the_cells() -> None:
    def beside_cudnn(heads: int, tokens: int, length: int, whose: str) -> str:
        (cell,) = (
            cell["milliseconds"]
            for cell in GROUPED["cells"]
            if (cell["heads"], cell["tokens"], cell["seq_len"]) == (heads, tokens, length)
            and cell["causal"]
            and cell["kv_heads"] < heads
        )
        return f"{cell['cudnn'] / cell[whose]:.2f}"

    short, long = beside_cudnn(16, 16384, 2048, "triton"), beside_cudnn(16, 16384, 8192, "2 a program")
    assert f"16/2 heads {short} at S = 2048 and {long} at 8192" in PAGE
    now, before = (beside_cudnn(8, 8192, 8192, f"{members} a program") for members in (1, 8))
    assert f"8/1 heads, one sequence of 8192, {now}, where it was {before}." in PAGE


def shares(name: str, head_dim: int | None = None) -> float:
    """By how much the time of a pass changed with the ties in the forward: the geometric mean of its cells."""
    before, after = (TIES[tree]["cells"] for tree in ("before", "triton"))
    return statistics.geometric_mean(
        new["foreshock"] / old["foreshock"]
        for old, new in zip(before, after, strict=True)
        if new["pass"] == name and new["head_dim"] in (head_dim or 64, head_dim or 128)
    )


def test_what_the_notebook_says_of_ties_in_the_forward_follows_from_the_cells() -> None:
    both, backward = ([f"{shares(name, dim):.3f}" for dim in (None, 64, 128)] for name in ("both", "backward"))
    assert f"both passes take {both[0]} of the time (D 64 {both[1]}, D 128 {both[2]})" in PAGE
    assert f"the backward {backward[0]} ({backward[1]}, {backward[2]})" in PAGE


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
