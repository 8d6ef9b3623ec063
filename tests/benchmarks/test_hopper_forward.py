"""The Gluon forward compiles for Hopper on any machine, into what it is written for."""

import re

import pytest

hopper_forward = pytest.importorskip("foreshock.benchmarks.hopper_forward", reason="needs a Triton that has Gluon")


@pytest.mark.parametrize(("dim", "causal"), [(128, False), (128, True), (64, True)])
def test_it_compiles_for_hopper_into_asynchronous_products_with_the_softmax_between_them(
    dim: int, causal: bool
) -> None:
    ptx = hopper_forward.compiled(dim, causal=causal).asm["ptx"]
    depth = 16
    products = dim // depth + BLOCK_OVER_DEPTH  # of scores, over the head dim; of values, over the keys
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == 2 * (dim // depth + products + BLOCK_OVER_DEPTH)
    assert "cp.async.bulk.tensor" in ptx
    loop = ptx[ptx.index("wgmma.wait_group.sync.aligned 1;") :]
    assert loop.index("ex2.approx") < loop.index("wgmma.wait_group.sync.aligned 0;")
    assert "st.local" not in ptx


BLOCK_OVER_DEPTH = 8


def test_without_such_a_gpu_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["hopper_forward"])
    with pytest.raises(SystemExit, match="needs an H100 or H200"):
        hopper_forward.main()
