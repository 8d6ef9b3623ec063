"""Runs the zoo on several processes and writes what became of each model.

The command: `python -P -m tests.zoo.run RECORD [NAME...]`.

RECORD is the JSON file to write (benchmarks/results/zoo.json); names limit the run to entries that contain one of them.
"""

import dataclasses
import json
import multiprocessing
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, Final

from tests.zoo import census
from tests.zoo.judge import Record, examine
from tests.zoo.running import at_most

PROCESSES: Final = 3
SECONDS: Final = 120
"""No model takes longer, or it counts as wrong."""


def look_at(name: str) -> dict[str, Any]:
    """The record of one entry; what raises is its only finding."""
    warnings.simplefilter("ignore")
    entry = census.entry(name)
    record = Record(name, entry.family)
    try:
        with at_most(SECONDS):
            record = examine(entry)
    except Exception as crash:
        where = traceback.extract_tb(crash.__traceback__)[-1]
        record.wrong.append(f"without foreshock: {type(crash).__name__}: {str(crash)[:150]} ({where.name})")
    return dataclasses.asdict(record)


def _write(target: Path, records: list[dict[str, Any]]) -> None:
    ordered = sorted(records, key=lambda record: str(record["name"]))
    target.write_text(json.dumps(ordered, indent=1) + "\n")


def _start() -> None:
    import torch

    torch.set_num_threads(1)


def main(arguments: list[str]) -> int:
    """Run, write, and say how many are wrong."""
    target, wanted = Path(arguments[0]), arguments[1:]
    names = [n for n in census.names() if not wanted or any(w in n for w in wanted)]
    with multiprocessing.get_context("spawn").Pool(PROCESSES, _start, maxtasksperchild=60) as pool:
        records = []
        for number, record in enumerate(pool.imap_unordered(look_at, names)):
            records.append(record)
            if number % 20 == 0:
                _write(target, records)
            if record["wrong"]:
                print(f"{number + 1}/{len(names)} {record['name']}: {record['wrong'][0]}", flush=True)
    _write(target, records)
    print(f"{sum(bool(r['wrong']) for r in records)} of {len(records)} are wrong")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
