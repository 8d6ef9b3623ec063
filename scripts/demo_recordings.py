"""Makes lab/shown/*.jsonl.gz, the recorded runs that `foreshock demo` plays, out of those in lab/traces.

What a replay does not read is left out: single steps, probes, verdicts (they are made anew), and steps past the last
one that is shown. The header says in `shows` which model was trained and how, taken from its recipe.
"""

import gzip
from pathlib import Path
from typing import Any, Final

from foreshock.lab.recording.packed import read_lines, text_of
from foreshock.lab.training.recipes import find_recipe

ROOT: Final = Path(__file__).resolve().parents[1]
TRACES: Final = ROOT / "src/foreshock/lab" / "traces"
SHOWN: Final = {
    "left-alone": "cure/kb256b128_untreated_seed1.trace.xz",
    "switched": "cure/kb256b128_rescued-all-row-corrected_seed1.trace.xz",
    "pytorch-flash": "vendor/kb256_flash-untreated_seed21.trace.xz",
}
"""The file of each run, by the name that people see. The first two are twins: one recipe, one seed."""
LAST_STEP: Final = 11_100
"""Where all that fails has failed, and where the demo ends."""
_KINDS: Final = ("started", "sample", "switched")


def lines_of(name: str) -> list[dict[str, Any]]:
    """The lines of one recording as they are shown, the header first."""
    header, *lines = read_lines(TRACES / SHOWN[name])
    recipe = find_recipe(header["recipe"])
    shows = {
        "file": SHOWN[name],
        "device": "H200",  # lab/traces/README.md
        "layers": recipe.model.layers,
        "heads": recipe.model.heads,
        "width": recipe.model.width,
        "key_bias": recipe.model.key_bias,
        "rotary": recipe.model.rotary,
        "text": recipe.text,
        "batch": recipe.batch,
        "learning_rate": recipe.learning_rate,
        "schedule": recipe.schedule,
        "recorded_steps": max(line["step"] for line in lines if line["kind"] == "sample"),
    }
    kept = [line for line in lines if line["kind"] in _KINDS and line["step"] <= LAST_STEP]
    return [header | {"shows": shows}, *kept]


def recordings() -> dict[str, str]:
    """The text of each file, by its name."""
    return {name: text_of(lines_of(name)) for name in SHOWN}


def main(folder: Path = ROOT / "src/foreshock/lab" / "shown") -> None:
    """Write the files and say how large they are."""
    for name, text in recordings().items():
        file = folder / f"{name}.jsonl.gz"
        file.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
