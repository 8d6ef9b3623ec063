"""One launch scales many parts of tensors by factors from a tensor, and writes nothing else."""

import pytest
import torch
from torch import Tensor

from foreshock.kernels import scaling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_scaling_rows_columns_views_and_biases_matches_a_loop(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, by_columns, bias = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((64, 300), (70, 96), (48,)))
    fragment = torch.randn(40, 500, device=DEVICE).to(dtype)[:, 3:90]  # its rows are not adjacent in memory

    def parts(tensors: tuple[Tensor, ...]) -> list[Tensor]:
        rows, columns, one, gaps = tensors
        return [rows[:16], rows[16:32], rows[33:64:4], columns[:, 32:64], columns[:, 64:96:2], one[8:24], gaps[4:40]]

    originals = (weight, by_columns, bias, fragment)
    expected = tuple(tensor.clone() for tensor in originals)
    factors = torch.tensor([0.5, 1.0, 1 / 3, 0.123456789], dtype=torch.float64, device=DEVICE)
    places = [0, 1, 2, 3, 2, 0, 3]
    for part, place in zip(parts(expected), places, strict=True):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        part.copy_(part.to(wide) * factors[place].to(wide))
    views = parts(originals)
    table = scaling.table_of(views, places)
    scaling.scale(table, factors, dtype, max(view.numel() for view in views))
    assert all(torch.equal(a, b) for a, b in zip(originals, expected, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_captured_launch_uses_the_current_factors() -> None:
    weight = torch.ones(8, 4096, device=DEVICE)
    factors = torch.ones(1, dtype=torch.float64, device=DEVICE)
    table = scaling.table_of([weight[:4]], [0])
    scaling.scale(table, factors, weight.dtype, 4 * 4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaling.scale(table, factors, weight.dtype, 4 * 4096)
    factors.fill_(0.5)
    graph.replay()
    graph.replay()
    assert torch.equal(weight[:4], torch.full_like(weight[:4], 0.25))
    assert torch.equal(weight[4:], torch.ones_like(weight[4:]))
