"""Lines of JSON, packed by columns: how recorded runs are published.

Gzipped lines hold numbers as text, head beside head. Here every list of numbers leaves its line and joins the lists
that stand at the same place in other lines: all values of one head follow one another, split into decimal mantissa,
byte by byte, and decimal exponent. The values are decimal (a recorder rounds to four digits), so nothing is lost:
what is read is equal to what was written, each number of the type that it had.

A file is xz over: a line of JSON with the columns, the lines without their lists, and the bytes of the columns.
"""

import gzip
import json
import lzma
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

RECORDED: Final = ".jsonl.gz"
PACKED: Final = ".trace.xz"
"""How the names of recordings end."""
_TAKEN: Final = ""
"""The only key of an object that stands where a list was; its value is the column. No recorder writes it."""
_INTEGER: Final = 127
"""In place of an exponent: the number is an int, not a float."""
_XZ: Final = b"\xfd7zXZ\0"
"""What every xz file begins with."""
_EXACT: Final = 2**53
_POWERS: Final = np.array([float(10**power) for power in range(23)])
"""The powers of ten that a double holds: one division or product by them rounds once, as reading the digits does."""
_FILTERS: Final = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0}]
"""Bytes of mantissas neither follow from the byte before nor repeat by alignment."""


@dataclass
class _Column:
    """The lists of one length at one place: `mantissas` and `exponents` of each."""

    number: int
    length: int
    mantissas: list[list[int]] = field(default_factory=list)
    exponents: list[list[int]] = field(default_factory=list)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a recording, gzipped (as it is recorded) or packed (as it is published).

    Raises ValueError with a sentence for a file that is neither, or not whole.
    """
    if not path.exists():
        raise ValueError(f"there is no trace at {path}; the recorded runs are part of the repository, in lab/traces")
    try:
        given = path.read_bytes()
        if given.startswith(_XZ):
            lines = unpack(given)
        else:
            lines = [json.loads(line) for line in gzip.decompress(given).splitlines() if line.strip()]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(
            f"{path} is not a whole trace: {error}; give gzipped JSON lines or a packed recording, written to their end"
        ) from None
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise ValueError(f"{path} holds no lines; give a trace with at least one sample")
    return lines


def read_header(path: Path) -> dict[str, Any]:
    """The first line of a recording, its header, without reading the rest.

    Lists of numbers, which no recorder writes there, stay packed. Raises ValueError for a file that does not begin
    with one.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(len(_XZ)) == _XZ
        with lzma.open(path) if packed else gzip.open(path) as unpacked:
            header = json.loads([unpacked.readline() for _ in range(3 if packed else 1)][-1])
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path} has no header: {error}; give a recording") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} has no header; give a recording")
    return header


def text_of(lines: list[dict[str, Any]]) -> str:
    """The lines as a recorder writes them, before they are compressed."""
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def pack(lines: list[dict[str, Any]]) -> bytes:
    """The packed file of `lines`. Raises ValueError where a line has the empty key."""
    columns: dict[tuple[str, int], _Column] = {}

    def taken(value: Any, place: str) -> Any:
        if isinstance(value, dict):
            if _TAKEN in value:
                raise ValueError(f"a line has an empty key at {place or 'its top'}; give lines whose keys have names")
            return {key: taken(inner, f"{place}/{key}") for key, inner in value.items()}
        if not isinstance(value, list):
            return value
        parts = [_decimal(number) for number in value]
        if not value or any(part is None for part in parts):
            return [taken(inner, place) for inner in value]
        column = columns.setdefault((place, len(value)), _Column(len(columns), len(value)))
        column.mantissas.append([part[0] for part in parts if part])
        column.exponents.append([part[1] for part in parts if part])
        return {_TAKEN: column.number}

    rest = [taken(line, str(line.get("kind", ""))) for line in lines]
    blocks, shapes = [], []
    for column in columns.values():
        # [lists, length] -> [length, lists]: all values of one head follow one another
        signed = np.array(column.mantissas, dtype=np.int64).T
        unsigned = np.ascontiguousarray((signed << 1) ^ (signed >> 63)).view(np.uint64)
        width = (int(unsigned.max()).bit_length() + 7) // 8
        shapes.append([column.length, len(column.mantissas), width])
        blocks += [np.array(column.exponents, dtype=np.int8).T.tobytes(), _planes(unsigned)[:width].tobytes()]
    head = f"{json.dumps(shapes)}\n{len(rest)}\n{text_of(rest)}"
    return lzma.compress(head.encode() + b"".join(blocks), filters=_FILTERS)


def unpack(packed: bytes) -> list[dict[str, Any]]:
    """The lines that were packed. Raises ValueError for a file that is cut short or was not made by `pack`."""
    try:
        shapes_line, count, rest = lzma.decompress(packed).split(b"\n", 2)
        *lines, block = rest.split(b"\n", int(count))
        columns = []
        for length, lists, width in json.loads(shapes_line):
            size = length * lists
            exponents = np.frombuffer(block[:size], dtype=np.int8)
            planes = np.zeros((8, size), dtype=np.uint8)
            planes[:width] = np.frombuffer(block[size : size * (1 + width)], dtype=np.uint8).reshape(width, size)
            unsigned = np.ascontiguousarray(planes.T).view("<u8")[:, 0]
            signed = (unsigned >> 1).astype(np.int64) ^ -(unsigned & 1).astype(np.int64)
            numbers = _numbers(signed, exponents)
            columns.append(iter([numbers[first::lists] for first in range(lists)]))
            block = block[size * (1 + width) :]
        return [json.loads(line, object_hook=lambda found: _put_back(found, columns)) for line in lines]
    except (lzma.LZMAError, ValueError, IndexError, TypeError, StopIteration) as error:
        raise ValueError(f"not a whole packed recording: {type(error).__name__} {error}") from None


def _put_back(found: dict[str, Any], columns: list[Iterator[list[float]]]) -> Any:
    return next(columns[found[_TAKEN]]) if _TAKEN in found else found


def _decimal(number: Any) -> tuple[int, int] | None:
    """Mantissa and decimal exponent of a number, or None for what is none or does not fit."""
    if type(number) is int:
        return (number, _INTEGER) if abs(number) < 2**62 else None
    if type(number) is not float or not math.isfinite(number) or (number == 0 and math.copysign(1, number) < 0):
        return None
    sign, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    mantissa = int("".join(map(str, digits)))
    return (-mantissa if sign else mantissa, int(exponent)) if abs(int(exponent)) < _INTEGER else None


def _numbers(mantissas: npt.NDArray[np.int64], exponents: npt.NDArray[np.int8]) -> list[float]:
    """The inverse of `_decimal` for many numbers, ints among them."""
    wide = exponents.astype(np.int64)
    power = _POWERS[np.minimum(abs(wide), len(_POWERS) - 1)]
    values: list[float] = np.where(wide < 0, mantissas / power, mantissas * power).tolist()
    for place in np.flatnonzero((abs(wide) >= len(_POWERS)) | (abs(mantissas) > _EXACT)).tolist():
        whole, exponent = int(mantissas[place]), int(wide[place])
        values[place] = whole if exponent == _INTEGER else float(f"{whole}e{exponent}")
    return values


def _planes(unsigned: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """Byte by byte, the lowest first: [8, count]."""
    return np.ascontiguousarray(unsigned.reshape(-1, 1).astype("<u8").view(np.uint8).T)
