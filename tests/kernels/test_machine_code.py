"""Products whose tiles stand where only some paths say are found in a listing, and no others."""

import pytest

pytest.importorskip("triton", reason="the listing is made by Triton's tools")

from tests.kernels.machine_code import products_of_stale_registers

START = ["UMOV UR9, 0x40000040", "UMOV UR10, 0x400", "UMOV UR11, 0x40000040"]
PLACE = "USGXT.U32 UR8, UR7, 0xe"
PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"
FROM_REGISTERS = "HGMMA.64x128x16.F32.BF16 R88, R180, gdesc[UR8].tnspB, R88"
PASSED_OVER = "@P0 BRA `(.L_x_1)"
AGAIN = "@P1 BRA `(.L_x_0)"


def listing(*lines: str) -> list[str]:
    """Lines as nvdisasm prints them: labels, and instructions with their addresses."""
    return [
        line if line.startswith(".L") else f"        /*{16 * place:04x}*/ {line} ;"
        for place, line in enumerate((*START, *lines, "EXIT"))
    ]


@pytest.mark.parametrize(
    "lines",
    [
        (PASSED_OVER, PLACE, ".L_x_1:", PRODUCT),
        (PLACE, PASSED_OVER, PLACE, ".L_x_1:", PRODUCT),
        (PLACE, ".L_x_0:", PASSED_OVER, PLACE, ".L_x_1:", PRODUCT, AGAIN),
        (PLACE, f"@P0 {PLACE}", PRODUCT),
        ("USGXT.U32 UR4, UR7, 0xe", PASSED_OVER, "UMOV UR4, UR6", ".L_x_1:", "UIADD3 UR8, UP0, UR4, 0x2, URZ", PRODUCT),
        (PRODUCT,),
        ("BRX R4 -0x290 (*\"BRANCH_TARGETS .L_x_0,.L_x_1\"*)", ".L_x_0:", PLACE, ".L_x_1:", PRODUCT),
    ],
)  # fmt: skip
def test_a_product_of_a_tile_whose_place_depends_on_the_path_is_found(lines: tuple[str, ...]) -> None:
    found = products_of_stale_registers(listing(*lines))
    assert [one.split(": ", 1)[1] for one in found] == [PRODUCT]


@pytest.mark.parametrize(
    "lines",
    [
        (PLACE, PRODUCT),
        (PLACE, PASSED_OVER, PRODUCT, ".L_x_1:", PRODUCT),
        (PASSED_OVER, PLACE, PRODUCT, ".L_x_1:", PLACE, PRODUCT),
        (".L_x_0:", PLACE, PRODUCT, AGAIN),
        (FROM_REGISTERS,),
        (PASSED_OVER, PLACE, "EXIT", ".L_x_1:", PLACE, PRODUCT),
        ("ULDC.64 UR8, c[0x0][0x208]", PRODUCT),
    ],
)
def test_a_product_of_a_tile_whose_place_is_the_same_on_every_path_is_not(lines: tuple[str, ...]) -> None:
    assert products_of_stale_registers(listing(*lines)) == []
