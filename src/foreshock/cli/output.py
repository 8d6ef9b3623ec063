"""Output of commands: tables as wide as the terminal for people; full names, JSON and CSV for programs."""

import csv
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

_PIPED_COLUMNS: Final = 10_000
"""Width for a pipe, where lines must not be truncated or wrapped."""
_ORDERS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters and bidirectional overrides, except line break and tab."""
_BLANKS: Final = re.compile(r" +$", re.MULTILINE)


class _Unpadded(StringIO):
    """Standard output without trailing blanks, which pad the last column of a table."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stdout.encoding

    def write(self, text: str) -> int:
        sys.stdout.write(_BLANKS.sub("", text))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


class _Console(Console):
    """A console that replaces control characters, because texts of agents and users could contain escape sequences."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text), **options)


def shown(text: str) -> str:
    """Replace the control characters in a text for the terminal; line breaks and tabs stay."""
    return _ORDERS.sub("\N{REPLACEMENT CHARACTER}", text)


def console() -> Console:
    """Return a console for tables and sentences, which does not truncate in a pipe."""
    if sys.stdout.isatty():
        return _Console(emoji=False)
    return _Console(emoji=False, width=_PIPED_COLUMNS, file=_Unpadded())


def say(text: str) -> None:
    """Print a sentence without markup and without wrapping."""
    print(shown(text))


def cell(value: Any) -> str:
    """Format a value for a table: a dash for None, four significant digits for a float."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of rows with the same keys; columns with numbers are right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0] if rows else ():
        numbers = any(isinstance(row[name], int | float) for row in rows)
        table.add_column(name.replace("_", " "), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell(value)) for value in row.values()))
    return table


def print_whole(table: Table, to: Console) -> None:
    """Print a table without truncating its cells; if the terminal is narrower, lines wrap."""
    whole = to.measure(table, options=to.options.update(max_width=_PIPED_COLUMNS)).maximum
    table.width = whole if whole > to.width else None
    to.print(table, soft_wrap=True)


def print_json(data: Any) -> None:
    """Print one JSON document; NaN and infinities become null."""
    print(_json(data, indent=2))


def print_result(data: Any, sentence: str, *, as_json: bool) -> None:
    """Print a result, as JSON or as a sentence."""
    if as_json:
        print_json(data)
    else:
        print(sentence)


def print_json_line(data: Any) -> None:
    """Print one JSON document on one line, and flush."""
    print(_json(data), flush=True)


def _json(data: Any, indent: int | None = None) -> str:
    text = json.dumps(plain(data), indent=indent, ensure_ascii=False, allow_nan=False)
    return _ORDERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def print_csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print CSV (RFC 4180) with a header line; unknown values are empty."""
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
