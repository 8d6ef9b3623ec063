"""`foreshock diagnose` as text on the terminal."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from foreshock.kernels.flash_attention.spec import NUMERICS
from foreshock.lab.diagnosis.anatomy import Examined
from foreshock.lab.diagnosis.examination import (
    Patient,
    diagnose,
    examine_patient,
    lab_patient,
    own_patient,
    suspects,
    try_removal,
)
from foreshock.lab.diagnosis.picture import draw
from foreshock.lab.diagnosis.verdict import judge
from foreshock.lab.diagnosis.wording import lines
from foreshock.lab.recording.history import History, live, recorded

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
    picture: Path | None,
) -> None:
    """Diagnose traces (.gz), checkpoints (other files), models (module:factory) and runs of a service (any other name).

    Raises ValueError with a sentence for a source that is none, a head that does not exist, unknown numerics.
    """
    if numerics is not None and numerics not in NUMERICS:
        raise ValueError(f"numerics {numerics!r} does not exist; use one of {', '.join(NUMERICS)}")
    chosen = [_head(head) for head in heads]
    histories: list[History] = []
    patients: list[AbstractContextManager[Patient]] = []
    for source in sources:
        path = Path(source)
        if path.name.endswith(".gz"):
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
            histories.append(live(source, url, token))
    if states and not any(":" in source for source in sources):
        raise ValueError("--state belongs to a model: give module:factory too, which builds it")
    examined: dict[int, list[Examined]] = {}
    trials, vitals = [], []
    for patient in patients:
        with patient as opened:
            vital, layers = examine_patient(opened, batches, numerics)  # type: ignore[arg-type]
            vitals.append(vital)
            for layer, measured in layers.items():
                examined.setdefault(layer, []).extend(measured)
            if layers:
                trials.append(try_removal(opened, chosen or suspects(histories, examined)))
    tried = [trial for trial in trials if trial is not None]
    verdict = judge(vitals, examined) if vitals else None
    found = diagnose(histories, examined, heads=chosen, trials=tried, verdict=verdict)
    found.notes = [note for vital in vitals for note in vital.notes]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for title, sentences in lines(found):
        table.add_row(title, "\n".join(sentences))
        table.add_row("", "")
    console.print(table, highlight=False)
    if json is not None:
        json.write_text(found.as_json())
        console.print(f"JSON: {json}")
    if picture is not None and not found.named:
        console.print("no picture: no head could be examined")
    elif picture is not None:
        draw(picture, found.named[0], histories, examined, ", ".join(found.sources))
        console.print(f"picture: {picture}")


def _head(text: str) -> tuple[int, int]:
    layer, _, head = text.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise ValueError(f"--head {text!r} names no head; write LAYER.HEAD, such as 0.1")
    return int(layer), int(head)
