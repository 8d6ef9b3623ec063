"""What a command says: tables as wide as the terminal for people, whole names, JSON and CSV for machines."""

import csv
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Any, Final

from rich.console import Console

_PIPED_COLUMNS: Final = 10_000
"""Nothing is shortened or broken where nobody watches."""
_BLANKS: Final = re.compile(r" +$", re.MULTILINE)

DONE, FAILED, UNANSWERED, REFUSED = 0, 1, 3, 4
"""Exit codes: done; an error in a sentence; ordered and not answered yet; answered, and not done (2 is wrong usage)."""


class _Unpadded(StringIO):
    """Standard output without the blanks at the ends of lines that fill a table's last column."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stdout.encoding

    def write(self, text: str) -> int:
        sys.stdout.write(_BLANKS.sub("", text))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


def console() -> Console:
    """A console for tables and sentences."""
    return Console() if sys.stdout.isatty() else Console(width=_PIPED_COLUMNS, file=_Unpadded())


def print_json(data: Any) -> None:
    """One JSON document; numbers that JSON has no word for are null."""
    print(json.dumps(plain(data), indent=2, ensure_ascii=False, allow_nan=False))


def print_result(data: Any, sentence: str, *, as_json: bool) -> None:
    """Print what was done: as JSON, or as a sentence."""
    if as_json:
        print_json(data)
    else:
        print(sentence)


def print_json_line(data: Any) -> None:
    """One JSON document on one line, at once."""
    print(json.dumps(plain(data), ensure_ascii=False, allow_nan=False), flush=True)


def print_csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """RFC 4180, with a line of names first; what is unknown is empty."""
    writer = csv.writer(sys.stdout)
    writer.writerow(head)
    for row in rows:
        writer.writerow(["" if _unknown(value) else value for value in row])


def _unknown(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
