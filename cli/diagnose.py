"""`foreshock diagnose` as text on the terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foreshock.cli.output import plain
from foreshock.client import Service
from foreshock.lab.diagnosis.examination import Source, of_checkpoint, of_factory, of_recording
from foreshock.lab.diagnosis.verdict import CELLS, Diagnosis, diagnose
from foreshock.lab.recording.history import live, recorded
from foreshock.lab.recording.packed import PACKED, RECORDED

_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def report(
    sources: Sequence[str],
    console: Console,
    *,
    url: str,
    token: str | None,
    states: Sequence[Path],
    heads: Sequence[str],
    batches: int,
    json: Path | None,
) -> None:
    """Diagnose traces, checkpoints (other files), models (module:factory) and runs of a service (any other name).

    Raises ValueError with a sentence for a source that is none and for a head that does not exist.
    """
    named = [_head(head) for head in heads]
    if states and not any(":" in source for source in sources):
        raise ValueError("--state belongs to a model: give module:factory too, which builds it")
    found = diagnose([each for source in sources for each in _read(source, states, batches, url, token)], named)
    verdict, *others = found.findings
    console.print(f"[bold]Verdict[/bold]: {escape(verdict.words)}", highlight=False)
    for finding in others:
        console.print(f"Also: {escape(finding.words)}", highlight=False)
    for note in found.left_out:
        console.print(f"Note: {escape(note)}", highlight=False)
    _print_table(found, console)
    console.print("\n[bold]What to do[/bold]")
    for sentence in dict.fromkeys(sentence for finding in found.findings for sentence in finding.advice):
        console.print(f"- {escape(sentence)}", highlight=False)
    if json is not None:
        json.write_text(dumps(plain(asdict(found)), indent=2, allow_nan=False) + "\n")
        console.print(f"JSON: {json}")


def _read(source: str, states: Sequence[Path], batches: int, url: str, token: str | None) -> Iterator[Source]:
    path = Path(source)
    if path.name.endswith((RECORDED, PACKED)):
        yield of_recording(recorded(path))
    elif path.is_file():
        yield of_checkpoint(path, batches)
    elif ":" in source and source.partition(":")[0].replace(".", "").isidentifier():
        for state in states or (None,):
            yield of_factory(source, state, batches)
    elif path.exists() or path.suffix in _FILES:
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"{source} {what}; weights of a model of your own go with --state after module:factory")
    else:
        with Service(url, token, timeout_seconds=30.0) as service:
            yield of_recording(live(source, service))


def _print_table(found: Diagnosis, console: Console) -> None:
    """A row for each quantity, a column for each head of each source."""
    several = len({head.source for head in found.heads}) > 1
    names = [f"{head} in {head.source}" if several else str(head) for head in found.heads]
    table = Table("", *map(escape, names), box=None, pad_edge=False, header_style="bold")
    for name, (title, form) in CELLS.items():
        cells = [head.cells.get(name) for head in found.heads]
        if any(cell is not None for cell in cells):
            table.add_row(title, *("-" if cell is None else escape(format(cell, form)) for cell in cells))
    if table.rows:
        console.print()
        console.print(table, highlight=False)


def _head(text: str) -> tuple[int, int]:
    layer, _, head = text.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise ValueError(f"--head {text!r} names no head; write LAYER.HEAD, such as 0.1")
    return int(layer), int(head)
