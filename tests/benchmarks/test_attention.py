"""The measured tables: every cell of the grid is kept, and the README shows them as they were measured."""

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from foreshock.benchmarks import attention_host
from foreshock.benchmarks.attention import Shape, grid, main, markdown, summary
from foreshock.benchmarks.stopwatch import PASSES
from foreshock.kernels.flash_attention import op

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/attention_h200.json").read_text())
TODAY = json.loads((ROOT / "benchmarks/results/attention_hopper_h200.json").read_text())
GROUPED = json.loads((ROOT / "benchmarks/results/attention_grouped_h200.json").read_text())
"""Grouped heads, which the last run did not reach, of the run before."""


def test_every_cell_of_the_grid_is_kept_with_every_contender() -> None:
    keys = ("head_dim", "heads", "kv_heads", "seq_len", "causal", "pass")
    kept = [tuple(cell[key] for key in keys) for cell in RESULT["cells"] + GROUPED["cells"]]
    wanted = [(s.head_dim, s.heads, s.kv_heads, s.seq_len, s.causal, which) for s in grid() for which in PASSES]
    assert kept == wanted
    for cell in RESULT["cells"] + GROUPED["cells"]:
        for name in ("foreshock", "foreshock_plain", "sdpa_flash", "sdpa_cudnn", "flex"):
            assert 0 < cell[name] < 1000


def served() -> list[dict[str, Any]]:
    """The cells of today's kernels: Hopper's serve head dim 128."""
    return [*(cell for cell in TODAY["triton"]["cells"] if cell["head_dim"] != 128), *TODAY["hopper"]["cells"]]


def test_the_readme_shows_the_tables_and_the_summary_follows_from_the_cells() -> None:
    page = (ROOT / "kernels/flash_attention/README.md").read_text()
    others = [c for c in RESULT["cells"] if c["seq_len"] in (2048, 16384) or c["kv_heads"] != c["heads"]]
    assert markdown(served()) in page
    assert markdown(others + GROUPED["cells"]) in page
    told = summary(RESULT["cells"])
    assert told == pytest.approx({name: RESULT["summary"][name] for name in told})


def test_what_the_readme_says_of_todays_kernels_follows_from_the_cells() -> None:
    page = (ROOT / "kernels/flash_attention/README.md").read_text()
    found, in_time = summary(served()), summary([cell for cell in served() if "host_late" not in cell])

    def beside(figures: dict[str, float], which: str) -> str:
        return " and ".join(f"{figures[f'{which}_{name}_ratio_to_sdpa_cudnn']:.2f}" for name in ("mean", "least"))

    assert f"forward {beside(found, 'forward')} (aims" in page
    assert f"backward {beside(found, 'backward')} (aims" in page
    assert f"without the host's cell {beside(in_time, 'backward')}; both {beside(found, 'both')}" in page
    cost, worst = (100 * found[f"statistics_cost{name}"] for name in ("", "_worst_cell"))
    assert f"it is {cost:.1f} % (worst {worst:.1f};" in page


def shares(name: str, head_dim: int | None = None) -> float:
    """By how much the time of a pass changed with the ties in the forward: the geometric mean of its cells."""
    before, after = (TODAY[tree]["cells"] for tree in ("before", "triton"))
    return statistics.geometric_mean(
        new["foreshock"] / old["foreshock"]
        for old, new in zip(before, after, strict=True)
        if new["pass"] == name and new["head_dim"] in (head_dim or 64, head_dim or 128)
    )


def test_what_the_readme_says_of_ties_in_the_forward_follows_from_the_cells() -> None:
    page = (ROOT / "kernels/flash_attention/README.md").read_text()
    both, backward = ([f"{shares(name, dim):.3f}" for dim in (None, 64, 128)] for name in ("both", "backward"))
    assert f"both passes take {both[0]} of the time (D 64 {both[1]}, D 128 {both[2]})" in page
    assert f"the backward {backward[0]} ({backward[1]}, {backward[2]})" in page


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        main()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_time_of_the_host_is_told_without_a_gpu_and_attention_is_served_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = op._kernels
    measured = attention_host.measure("cpu", rounds=1, calls=2)
    names = ("foreshock_forward", "sdpa_forward", "foreshock_both", "sdpa_both")
    assert tuple(measured) == names
    assert min(measured.values()) > 0
    assert op._kernels is kernels
    attention_host.main(str(tmp_path / "host.json"))
    assert json.loads((tmp_path / "host.json").read_text()).keys() >= set(names)
    assert "foreshock_both: " in (told := capsys.readouterr().out)
    assert "launches left out: no GPU" in told
