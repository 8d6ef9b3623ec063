"""The measured tables: every cell of the grid is kept, and the README shows them as they were measured."""

import json
from pathlib import Path

import pytest
import torch

from foreshock.benchmarks.attention import PASSES, grid, main, markdown, summary

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks/results/attention_h200.json").read_text())


def test_every_cell_of_the_grid_is_kept_with_every_contender() -> None:
    keys = ("head_dim", "heads", "kv_heads", "seq_len", "causal", "pass")
    kept = [tuple(cell[key] for key in keys) for cell in RESULT["cells"]]
    wanted = [(s.head_dim, s.heads, s.kv_heads, s.seq_len, s.causal, which) for s in grid() for which in PASSES]
    assert kept == wanted
    for cell in RESULT["cells"]:
        for name in ("foreshock", "foreshock_plain", "sdpa_flash", "sdpa_cudnn", "flex"):
            assert 0 < cell[name] < 1000


def test_the_readme_shows_the_table_and_the_summary_follows_from_the_cells() -> None:
    assert markdown(RESULT["cells"]) in (ROOT / "kernels/flash_attention/README.md").read_text()
    assert summary(RESULT["cells"]) == pytest.approx(RESULT["summary"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        main()
