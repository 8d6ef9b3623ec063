"""Products whose tile address depends on the execution path are found in a listing, and no others."""

import pytest

pytest.importorskip("triton", reason="Triton's tools make the listing")

from tests.kernels.machine_code import products_of_stale_registers

START = ["UMOV UR9, 0x40000040", "UMOV UR10, 0x400", "UMOV UR11, 0x40000040"]
SET_ADDRESS = "USGXT.U32 UR8, UR7, 0xe"
PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"
FROM_REGISTERS = "HGMMA.64x128x16.F32.BF16 R88, R180, gdesc[UR8].tnspB, R88"
SKIP = "@P0 BRA `(.L_x_1)"
LOOP_BACK = "@P1 BRA `(.L_x_0)"


def listing(*lines: str) -> list[str]:
    """Lines as nvdisasm prints them: labels, and instructions with their addresses."""
    return [
        line if line.startswith(".L") else f"        /*{16 * place:04x}*/ {line} ;"
        for place, line in enumerate((*START, *lines, "EXIT"))
    ]


@pytest.mark.parametrize(
    "lines",
    [
        (SKIP, SET_ADDRESS, ".L_x_1:", PRODUCT),
        (SET_ADDRESS, SKIP, SET_ADDRESS, ".L_x_1:", PRODUCT),
        (SET_ADDRESS, ".L_x_0:", SKIP, SET_ADDRESS, ".L_x_1:", PRODUCT, LOOP_BACK),
        (SET_ADDRESS, f"@P0 {SET_ADDRESS}", PRODUCT),
        ("USGXT.U32 UR4, UR7, 0xe", SKIP, "UMOV UR4, UR6", ".L_x_1:", "UIADD3 UR8, UP0, UR4, 0x2, URZ", PRODUCT),
        (PRODUCT,),
        ("BRX R4 -0x290 (*\"BRANCH_TARGETS .L_x_0,.L_x_1\"*)", ".L_x_0:", SET_ADDRESS, ".L_x_1:", PRODUCT),
    ],
)  # fmt: skip
def test_product_with_a_path_dependent_tile_address_is_found(lines: tuple[str, ...]) -> None:
    found = products_of_stale_registers(listing(*lines))
    assert [one.split(": ", 1)[1] for one in found] == [PRODUCT]


@pytest.mark.parametrize(
    "lines",
    [
        (SET_ADDRESS, PRODUCT),
        (SET_ADDRESS, SKIP, PRODUCT, ".L_x_1:", PRODUCT),
        (SKIP, SET_ADDRESS, PRODUCT, ".L_x_1:", SET_ADDRESS, PRODUCT),
        (".L_x_0:", SET_ADDRESS, PRODUCT, LOOP_BACK),
        (FROM_REGISTERS,),
        (SKIP, SET_ADDRESS, "EXIT", ".L_x_1:", SET_ADDRESS, PRODUCT),
        ("ULDC.64 UR8, c[0x0][0x208]", PRODUCT),
    ],
)
def test_product_with_the_same_tile_address_on_every_path_is_not_found(lines: tuple[str, ...]) -> None:
    assert products_of_stale_registers(listing(*lines)) == []
