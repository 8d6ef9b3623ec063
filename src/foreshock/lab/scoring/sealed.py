"""What is held out is scored once: the seal on the held-out half of the runs on real text.

Thresholds that are moved after a look at held-out runs are tuned on them. So `foreshock lab score` refuses these runs
(real_text_split.json names them) unless --held-out breaks the seal; it then writes down which runs were scored and a
hash of the verdicts on them. From then on it refuses any other runs, and detectors whose verdicts differ:
code that became faster may score them again. The file is committed beside the traces.
"""

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from foreshock.lab.recording.packed import PACKED, RECORDED, read_header, read_lines, text_of
from foreshock.lab.recording.replay import verdicts
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.training.real_text_split import assigned
from foreshock.monitor.detect.detectors import DetectorConfig

_NAMED = 3


def sealed(paths: Sequence[Path]) -> list[Path]:
    """Those of `paths` that hold a held-out run on real text."""
    return [path for path in paths if _held_out(path)]


def break_seal(paths: Sequence[Path], config: DetectorConfig, seal: Path | None) -> None:
    """Let the held-out runs among `paths` be scored by these detectors, and write that down in `seal`.

    Raises ValueError for held-out runs without a `seal`, and where that file tells of other detectors or other runs.
    """
    held_out = sorted(sealed(paths), key=lambda path: path.name)
    if not held_out:
        return
    if twice := next((one.name for one, other in pairwise(held_out) if one.name == other.name), None):
        raise ValueError(f"two held-out runs are named {twice}; give each a name of its own")
    if seal is None:
        names = ", ".join(path.name for path in held_out[:_NAMED])
        more = f" and {len(held_out) - _NAMED} more" if len(held_out) > _NAMED else ""
        raise ValueError(
            f"{names}{more} are held out: they are scored once, when no threshold will move any more. Leave them out, "
            "or score them all with --held-out FILE, which keeps their names and a hash of the verdicts"
        )
    runs = {_name(path): text_hash(path) for path in held_out}
    if not seal.exists():
        seal.write_text(json.dumps({"runs": runs, "said": verdicts_hash(held_out, config)}, indent=1) + "\n")
        return
    before = json.loads(seal.read_text())
    other = "runs" if before["runs"] != runs else None
    if other is None and before["said"] != verdicts_hash(held_out, config):
        other = "detectors"
    if other is not None:
        raise ValueError(
            f"{seal} says that held-out runs were scored before, with other {other}; what was seen is not held "
            "out any more. Score new runs, by a new split"
        )


def text_hash(path: Path) -> str:
    """SHA-256 of a recording's lines, however they are compressed."""
    return hashlib.sha256(text_of(read_lines(path)).encode()).hexdigest()


def verdicts_hash(paths: Sequence[Path], config: DetectorConfig) -> str:
    """SHA-256 of every warning that the detectors give in the runs of `paths`, by name: its words, cause and forecast.

    The numbers of its evidence are left out: a sum in another order moves their last digits.
    """
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        digest.update(_name(path).encode())
        for verdict in verdicts(read_trace(path), config):
            digest.update(verdict.model_dump_json(exclude={"evidence"}).encode())
    return digest.hexdigest()


def _name(path: Path) -> str:
    """The name that a recording was scored under, before it was packed."""
    return path.name.replace(PACKED, RECORDED)


def _held_out(path: Path) -> bool:
    """Raises nothing: a file that is no trace is refused by who reads it whole."""
    try:
        header = read_header(path)
    except ValueError:
        return False
    return assigned(str(header.get("recipe")), header.get("seed")) == "held-out"
