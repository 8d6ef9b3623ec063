"""What a command says: tables as wide as the terminal for people, whole names, JSON and CSV for machines."""

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
"""Nothing is shortened or broken where nobody watches."""
_ORDERS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal acts on, or that turn the order of others; a line break and a tab stay."""
_BLANKS: Final = re.compile(r" +$", re.MULTILINE)


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


class _Console(Console):
    """What others wrote moves no cursor: agents and people say sentences, which a terminal would take for orders."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text), **options)


def shown(text: str) -> str:
    """Text as a terminal may get it, its own lines kept."""
    return _ORDERS.sub("\N{REPLACEMENT CHARACTER}", text)


def console() -> Console:
    """A console for tables and sentences."""
    if sys.stdout.isatty():
        return _Console(emoji=False)
    return _Console(emoji=False, width=_PIPED_COLUMNS, file=_Unpadded())


def say(text: str) -> None:
    """Print a sentence as it is: no markup, and no line break that it has not."""
    print(shown(text))


def cell(value: Any) -> str:
    """A value in a table: a dash for what is unknown, four digits of a float."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of rows with the same names, its numbers on the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0] if rows else ():
        numbers = any(isinstance(row[name], int | float) for row in rows)
        table.add_column(name.replace("_", " "), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell(value)) for value in row.values()))
    return table


def print_whole(table: Table, to: Console) -> None:
    """A table whose numbers stand whole: in a terminal that is narrower, its lines go on in the next one."""
    whole = to.measure(table, options=to.options.update(max_width=_PIPED_COLUMNS)).maximum
    table.width = whole if whole > to.width else None
    to.print(table, soft_wrap=True)


def print_json(data: Any) -> None:
    """One JSON document; numbers that JSON has no word for are null."""
    print(_json(data, indent=2))


def print_result(data: Any, sentence: str, *, as_json: bool) -> None:
    """Print what was done: as JSON, or as a sentence."""
    if as_json:
        print_json(data)
    else:
        print(sentence)


def print_json_line(data: Any) -> None:
    """One JSON document on one line, at once."""
    print(_json(data), flush=True)


def _json(data: Any, indent: int | None = None) -> str:
    text = json.dumps(plain(data), indent=indent, ensure_ascii=False, allow_nan=False)
    return _ORDERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


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
