"""`foreshock diagnose` as text on the terminal."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from json import dumps
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foreshock.cli.output import plain
from foreshock.client import Service
from foreshock.kernels.flash_attention.spec import NUMERICS
from foreshock.lab.diagnosis.anatomy import Examined
from foreshock.lab.diagnosis.examination import Patient, diagnose, examine_patient, lab_patient, own_patient
from foreshock.lab.diagnosis.tables import Row, of_courses, of_tensors
from foreshock.lab.diagnosis.verdict import judge
from foreshock.lab.recording.history import History, live, recorded
from foreshock.lab.recording.packed import PACKED, RECORDED

_WITHOUT_TENSORS = (
    "Who carries the error needs tensors: add a checkpoint (foreshock lab run --checkpoint FILE), or module:factory "
    "and --state."
)
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
    numerics: str | None,
    json: Path | None,
) -> None:
    """Diagnose traces, checkpoints (other files), models (module:factory) and runs of a service (any other name).

    Raises ValueError with a sentence for a source that is none, a head that does not exist, unknown numerics.
    """
    if numerics is not None and numerics not in NUMERICS:
        raise ValueError(f"numerics {numerics!r} does not exist; use one of {', '.join(NUMERICS)}")
    chosen = [_head(head) for head in heads]
    histories: list[History] = []
    patients: list[AbstractContextManager[Patient]] = []
    for source in sources:
        path = Path(source)
        if path.name.endswith((RECORDED, PACKED)):
            histories.append(recorded(path))
        elif path.is_file():
            patients.append(lab_patient(path))
        elif ":" in source and source.partition(":")[0].replace(".", "").isidentifier():
            patients += [own_patient(source, state) for state in states or (None,)]
        elif path.exists() or path.suffix in _FILES:
            what = "a folder" if path.is_dir() else "no file"
            raise ValueError(
                f"{source} is {what}; weights of a model of your own go with --state beside module:factory"
            )
        else:
            with Service(url, token, timeout_seconds=30.0) as service:
                histories.append(live(source, service))
    if states and not any(":" in source for source in sources):
        raise ValueError("--state belongs to a model: give module:factory too, which builds it")
    examined: dict[int, list[Examined]] = {}
    vitals = []
    for patient in patients:
        with patient as opened:
            vital, layers = examine_patient(opened, batches, numerics)  # type: ignore[arg-type]
            vitals.append(vital)
            for layer, measured in layers.items():
                examined.setdefault(layer, []).extend(measured)
    verdict = judge(vitals, examined) if vitals else None
    found = diagnose(histories, examined, heads=chosen, verdict=verdict)
    found.notes = [note for vital in vitals for note in vital.notes]
    if verdict is not None:
        console.print(f"[bold]Verdict[/bold]: {escape(' '.join([verdict.words, *found.notes]))}", highlight=False)
    heads_of = [f"layer {each.layer} head {each.head}" for each in found.courses]
    _print("As recorded", heads_of, of_courses(found.courses), console)
    heads_of = [f"layer {each.layer} head {each.head}" for each in found.anatomies]
    _print("From tensors", heads_of, of_tensors(found.anatomies), console)
    if verdict is None:
        console.print(_WITHOUT_TENSORS)
    console.print("\n[bold]What to do[/bold]")
    for sentence in found.advice:
        console.print(f"- {escape(sentence)}", highlight=False)
    if json is not None:
        json.write_text(dumps(plain(asdict(found)), indent=2, allow_nan=False) + "\n")
        console.print(f"JSON: {json}")


def _print(title: str, heads: Sequence[str], rows: Sequence[Row], console: Console) -> None:
    """A row for each quantity, a column for each head."""
    if not rows:
        return
    table = Table(title, *heads, box=None, pad_edge=False, header_style="bold")
    for name, cells in rows:
        table.add_row(name, *cells)
    console.print()
    console.print(table, highlight=False)


def _head(text: str) -> tuple[int, int]:
    layer, _, head = text.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise ValueError(f"--head {text!r} names no head; write LAYER.HEAD, such as 0.1")
    return int(layer), int(head)
