"""The measured tables: every cell of the grid is kept, and the README shows them as they were measured."""

import json
from pathlib import Path

import pytest
import torch

from foreshock.benchmarks import attention_host
from foreshock.benchmarks.attention import grid, main, markdown, summary
from foreshock.benchmarks.stopwatch import PASSES
from foreshock.kernels.flash_attention import op

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/attention_h200.json").read_text())
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


def test_the_readme_shows_the_table_and_the_summary_follows_from_the_cells() -> None:
    page = (ROOT / "kernels/flash_attention/README.md").read_text()
    assert markdown(RESULT["cells"]) in page
    assert markdown(GROUPED["cells"]) in page
    told = summary(RESULT["cells"])
    assert told == pytest.approx({name: RESULT["summary"][name] for name in told})


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
