"""The prototype of the Hopper backward compiles on any machine into what it is written for."""

import re
from pathlib import Path

import pytest

machine_code = pytest.importorskip("tests.kernels.machine_code", reason="the listing is made by Triton's tools")
prototype = pytest.importorskip(
    "foreshock.benchmarks.hopper_backward_prototype", reason="needs a Triton that has Gluon"
)
DIM, KEYS, QUERIES, DEPTH = 128, 64, 64, 16
SHARED_MEMORY = 232_448


@pytest.mark.parametrize(("causal", "late"), [(False, False), (True, False), (True, True)])
def test_it_compiles_into_five_products_a_tile_that_keep_to_registers_and_shared_memory(
    causal: bool, late: bool, tmp_path: Path
) -> None:
    made = prototype.compiled(causal=causal, late=late)
    ptx = made.asm["ptx"]
    of_scores = 1 + DIM // DEPTH  # the first adds -lse, or -delta
    grads = 2 * QUERIES // DEPTH
    of_query = 2 * KEYS // DEPTH
    # Of two groups each: the first tile's P and dP, the loop, and the last tile's gradients.
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == 2 * 2 * (2 * of_scores + grads + of_query)
    assert "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add" in ptx
    assert "st.local" not in ptx
    assert made.metadata.shared <= SHARED_MEMORY
    lines = machine_code.listing(made, tmp_path)
    assert any("HGMMA" in line for line in lines)
    assert machine_code.products_of_stale_registers(lines) == []


@pytest.mark.parametrize("causal", [False, True])
def test_the_exponentials_stand_between_asking_for_a_product_and_waiting_for_it(causal: bool) -> None:
    ptx = prototype.compiled(causal=causal).asm["ptx"]
    for between in re.findall(r"wgmma\.wait_group\.sync\.aligned 2;(.*?)wgmma\.wait_group", ptx, re.DOTALL):
        if "ex2.approx" in between:
            return
    pytest.fail("no exponential runs beside a product")
