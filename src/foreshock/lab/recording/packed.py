"""Reads recordings: gzipped lines of JSON, as they are recorded, and lines packed by columns, as older ones are kept.

Gzipped lines hold numbers as text. In a packed file every list of numbers leaves its line and joins the lists
that stand at the same place in other lines: all values of one head follow one another, split into decimal mantissa,
byte by byte, and decimal exponent. The values are decimal (a recorder rounds to four digits), so nothing is lost:
what is read is equal to what was written, each number of the type that it had.

A file is xz over: a line of JSON with the columns, the lines without their lists, and the bytes of the columns.
"""

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
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


def _numbers(mantissas: npt.NDArray[np.int64], exponents: npt.NDArray[np.int8]) -> list[float]:
    """The numbers of these decimal mantissas and exponents, ints among them."""
    wide = exponents.astype(np.int64)
    power = _POWERS[np.minimum(abs(wide), len(_POWERS) - 1)]
    values: list[float] = np.where(wide < 0, mantissas / power, mantissas * power).tolist()
    for place in np.flatnonzero((abs(wide) >= len(_POWERS)) | (abs(mantissas) > _EXACT)).tolist():
        whole, exponent = int(mantissas[place]), int(wide[place])
        values[place] = whole if exponent == _INTEGER else float(f"{whole}e{exponent}")
    return values
