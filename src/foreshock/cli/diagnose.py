"""Terminal output of `foreshock diagnose`."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foreshock.cli.output import plain
from foreshock.lab.diagnosis.examination import Head, Source, of_factory, of_recording
from foreshock.lab.diagnosis.verdict import diagnose, shown_heads
from foreshock.lab.recording.trace import PUBLISHED, RECORDED

_ROWS: Final = {
    "offset": ("offset, nats", "+.1f"),
    "shift": ("shift of all scores together, nats", "+.1f"),
    "largest": ("largest |score|", ".0f"),
    "entropy": ("entropy of attention, nats", ".2f"),
    "ties": ("rows with several P = 1", ".1%"),
    "output error": ("output off float64", ".2%"),
    "empty": ("rows that see no key", ".1%"),
}
"""Rows of the table: title and number format by measurement."""


def report(sources: Sequence[str], console: Console, *, states: Sequence[str], batches: int, json: Path | None) -> None:
    """Diagnose traces and models (module:factory).

    Raises ValueError for a source that does not exist or is not supported.
    """
    if states and not any(":" in source for source in sources):
        raise ValueError("--state needs a model: add module:factory, which builds it")
    read = [each for source in sources for each in _read(source, states, batches)]
    findings, notes = diagnose(read), [note for source in read for note in source.notes]
    for number, finding in enumerate(findings):
        console.print(f"{'Also' if number else '[bold]Verdict[/bold]'}: {escape(finding.words)}", highlight=False)
    for note in notes:
        console.print(f"Note: {escape(note)}", highlight=False)
    if heads := shown_heads(read, findings):
        console.print()
        console.print(_table(heads), highlight=False)
    console.print("\n[bold]What to do[/bold]")
    for sentence in dict.fromkeys(sentence for finding in findings for sentence in finding.advice):
        console.print(f"- {escape(sentence)}", highlight=False)
    if json is not None:
        heads = [head for source in read for head in source.heads]
        whole = {"findings": list(map(asdict, findings)), "heads": list(map(asdict, heads)), "notes": notes}
        json.write_text(dumps(plain(whole), indent=2, allow_nan=False) + "\n")
        console.print(f"JSON: {json}")


def _read(source: str, states: Sequence[str], batches: int) -> Iterator[Source]:
    path = Path(source)
    if path.name.endswith((RECORDED, PUBLISHED)):
        yield of_recording(path)
    elif ":" in source and source.partition(":")[0].replace(".", "").isidentifier():
        for state in states or (None,):
            yield of_factory(source, state, batches)
    else:
        raise ValueError(
            f"{source} is neither a trace ({PUBLISHED} or {RECORDED}) nor module:factory, whose checkpoints go with "
            "--state. For a run of the service use foreshock incidents"
        )


def _table(heads: Sequence[Head]) -> Table:
    """Return a table with a row for each measurement and a column for each head of each source."""
    several = len({head.source for head in heads}) > 1
    names = (escape(f"{head} in {head.source}" if several else str(head)) for head in heads)
    table = Table("", *names, box=None, pad_edge=False, header_style="bold")
    if any(head.warned for head in heads):
        table.add_row("warned at step", *(", ".join(map(str, head.warned or "-")) for head in heads))
    for name, (title, form) in _ROWS.items():
        if any(name in head.cells for head in heads):
            table.add_row(title, *(format(head.cells[name], form) if name in head.cells else "-" for head in heads))
    return table
