"""What a compiled kernel's machine code does wrong however right the code is that it was made from."""

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
"""Where each uniform register may have been set last."""


def listing(compiled: Any, folder: Path) -> list[str]:
    """The machine code of a kernel; Triton's own listing ends early."""
    place = folder / "kernel.cubin"
    place.write_bytes(compiled.asm["cubin"])
    command = [knobs.nvidia.nvdisasm.path, "-c", str(place)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def products_of_stale_registers(lines: list[str]) -> list[str]:
    """Products of tiles whose place in shared memory stands in uniform registers that another instruction sets where
    another path was taken, or none.

    ptxas (12.8) compiled such ones where a loop that may be passed over, and the code behind it, multiply one tile: it
    set the registers before the loop alone, and they held an earlier tile's place, or nothing, where it was passed.
    """
    blocks = _blocks(lines)
    names = list(blocks)
    known: dict[str, _Set] = {names[0]: {}}
    todo, stale = [names[0]], set()
    while todo:
        at = todo.pop()
        have, onward = dict(known[at]), True
        for address, conditional, name, operands in blocks[at]:
            if name.startswith("HGMMA") and _several(_read(operands), have):
                stale.add(f"{address}: {name} {operands}")
            written = _written(name, operands)
            # The places of a tile's parts are sums of its own.
            if name.startswith(("UIADD3", "UMOV")) and _several(map(int, _REGISTER.findall(operands)[1:]), have):
                address += _STALE
            for one in written:
                have[one] = (have.get(one, frozenset({""})) if conditional else frozenset()) | {address}
            if name in ("BRA", "BRX"):
                for target in re.findall(r"\.L_x_\d+", operands):
                    _reach(target, have, known, todo)
            if name in ("BRA", "BRX", "EXIT") and not conditional:
                onward = False
                break
        after = names.index(at) + 1
        if onward and after < len(names):
            _reach(names[after], have, known, todo)
    return sorted(stale)


def _blocks(lines: list[str]) -> dict[str, list[tuple[str, bool, str, str]]]:
    """Instructions from each label on: address, whether under a condition, name, operands."""
    blocks: dict[str, list[tuple[str, bool, str, str]]] = defaultdict(list)
    at = "start"
    for line in lines:
        if label := _LABEL.match(line):
            at = label[1]
        elif found := _INSTRUCTION.match(line):
            blocks[at].append((found[1], found[2] is not None, found[3], found[4].rstrip(" ;")))
    return blocks


def _several(registers: Iterable[int], have: _Set) -> bool:
    """Whether any of them is set in several places, or in none on some path, or from what is."""
    unset = frozenset({""})
    return any(
        len(found := have.get(one, unset)) > 1 or "" in found or any(_STALE in at for at in found) for one in registers
    )


def _read(operands: str) -> range:
    """The uniform registers that hold a product's descriptors: two for each operand that lies in shared memory."""
    found = _DESCRIPTORS.match(operands)
    return range(int(found[2]) + 2 * (found[1] is not None), int(found[2]) + 4) if found else range(0)


def _written(name: str, operands: str) -> range:
    """Uniform registers that an instruction sets: its first operand, if it is one."""
    found = _REGISTER.match(operands)
    if found is None or not name.startswith(("U", "R2UR", "S2UR")):
        return range(0)
    return range(int(found[1]), int(found[1]) + (2 if ".64" in name or ".WIDE" in name else 1))


def _reach(target: str, have: _Set, known: dict[str, _Set], todo: list[str]) -> None:
    """Note what is set where a block is reached, and look at the block again where that is news."""
    before = known.get(target)
    if before is None:
        after = have
    else:
        nothing = frozenset({""})
        after = {one: before.get(one, nothing) | have.get(one, nothing) for one in before.keys() | have.keys()}
    if after != before:
        known[target] = dict(after)
        todo.append(target)
