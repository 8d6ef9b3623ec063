"""Finds errors that the compiler introduces into the machine code of a kernel."""

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from triton import knobs

_LABEL: Final = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION: Final = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(@!?U?P\d+\s+)?(\S+)\s*(.*)$")
_REGISTER: Final = re.compile(r"UR(\d+)\b")
_DESCRIPTORS: Final = re.compile(r"R\d+, (R\d+, )?gdesc\[UR(\d+)\]")
_STALE: Final = "?"
_Set = dict[int, frozenset[str]]
"""Addresses of the instructions that may have set each uniform register last."""


def listing(compiled: Any, folder: Path) -> list[str]:
    """The machine code of a kernel; Triton's own listing ends early."""
    place = folder / "kernel.cubin"
    place.write_bytes(compiled.asm["cubin"])
    command = [knobs.nvidia.nvdisasm.path, "-c", str(place)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def products_of_stale_registers(lines: list[str]) -> list[str]:
    """Products whose tile address is in uniform registers that different paths set by different instructions, or not
    at all.

    ptxas (12.8) compiled such products if a loop that may be skipped and the code after it multiply the same tile: it
    set the registers only before the loop, so that they had the address of an earlier tile, or none, if it was skipped.
    """
    blocks = _blocks(lines)
    names = list(blocks)
    known: dict[str, _Set] = {names[0]: {}}
    todo, stale = [names[0]], set()
    while todo:
        at = todo.pop()
        current, continues = dict(known[at]), True
        for address, conditional, name, operands in blocks[at]:
            if name.startswith("HGMMA") and _is_stale(_read(operands), current):
                stale.add(f"{address}: {name} {operands}")
            written = _written(name, operands)
            # The addresses of a tile's parts are sums of the tile's address and a constant.
            if name.startswith(("UIADD3", "UMOV")) and _is_stale(map(int, _REGISTER.findall(operands)[1:]), current):
                address += _STALE
            for one in written:
                current[one] = (current.get(one, frozenset({""})) if conditional else frozenset()) | {address}
            if name in ("BRA", "BRX"):
                for target in re.findall(r"\.L_x_\d+", operands):
                    _reach(target, current, known, todo)
            if name in ("BRA", "BRX", "EXIT") and not conditional:
                continues = False
                break
        after = names.index(at) + 1
        if continues and after < len(names):
            _reach(names[after], current, known, todo)
    return sorted(stale)


def _blocks(lines: list[str]) -> dict[str, list[tuple[str, bool, str, str]]]:
    """Instructions after each label: address, whether conditional, name, operands."""
    blocks: dict[str, list[tuple[str, bool, str, str]]] = defaultdict(list)
    at = "start"
    for line in lines:
        if label := _LABEL.match(line):
            at = label[1]
        elif found := _INSTRUCTION.match(line):
            blocks[at].append((found[1], found[2] is not None, found[3], found[4].rstrip(" ;")))
    return blocks


def _is_stale(registers: Iterable[int], current: _Set) -> bool:
    """Whether any register is set in several places, or not on every path, or from such a register."""
    unset = frozenset({""})
    return any(
        len(found := current.get(one, unset)) > 1 or "" in found or any(_STALE in at for at in found)
        for one in registers
    )


def _read(operands: str) -> range:
    """The uniform registers with a product's descriptors: two for each operand in shared memory."""
    found = _DESCRIPTORS.match(operands)
    return range(int(found[2]) + 2 * (found[1] is not None), int(found[2]) + 4) if found else range(0)


def _written(name: str, operands: str) -> range:
    """Uniform registers that an instruction sets: its first operand, if it is one."""
    found = _REGISTER.match(operands)
    if found is None or not name.startswith(("U", "R2UR", "S2UR")):
        return range(0)
    return range(int(found[1]), int(found[1]) + (2 if ".64" in name or ".WIDE" in name else 1))


def _reach(target: str, current: _Set, known: dict[str, _Set], todo: list[str]) -> None:
    """Merge the registers that are set at the entry of a block, and queue the block again if they changed."""
    before = known.get(target)
    if before is None:
        after = current
    else:
        nothing = frozenset({""})
        after = {one: before.get(one, nothing) | current.get(one, nothing) for one in before.keys() | current.keys()}
    if after != before:
        known[target] = dict(after)
        todo.append(target)
