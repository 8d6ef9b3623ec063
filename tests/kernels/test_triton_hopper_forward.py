"""The Hopper forward in Gluon compiles on any machine into what it is written for, and on such a GPU is right."""

import re
import time

import pytest
import torch

hopper_forward = pytest.importorskip("foreshock.benchmarks.hopper_forward", reason="needs a Triton that has Gluon")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEPTH, BLOCK = 16, 128


@pytest.mark.parametrize(("dim", "causal", "residual"), [(128, False, True), (128, True, False), (64, True, True)])
def test_it_compiles_into_asynchronous_products_with_the_softmax_between_them(
    dim: int, causal: bool, residual: bool
) -> None:
    ptx = hopper_forward.compiled(dim, causal=causal, residual=residual).asm["ptx"]
    scores, values = dim // DEPTH, BLOCK // DEPTH
    # Of two groups of warps each: the first scores, the loop, and a block's last values beside the next one's scores.
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == 2 * (scores + 2 * (scores + values))
    assert "cp.async.bulk.tensor.4d" in ptx
    loop = ptx[ptx.index("wgmma.wait_group.sync.aligned 1;") :]
    assert loop.index("ex2.approx") < loop.index("wgmma.wait_group.sync.aligned 0;")
    assert "st.local" not in ptx


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
def test_every_case_is_as_exact_as_the_triton_forward_gives_equal_bits_and_writes_nothing_else() -> None:
    tasks = [f"check {i}" for i in range(len(hopper_forward.CASES))]
    results = hopper_forward.in_processes(tasks, 4, time.monotonic() + 600)
    assert [said for said in results if said["wrong"]] == []
    assert len(results) == len(tasks)
