"""Runs the zoo on several processes and writes what became of each model.

The command: `python -P tests/zoo RECORD [--processes 3] [NAME...]`.

RECORD is the JSON file to write; what it holds already and found right is not run again, so that a run that was stopped
goes on. Names limit the run to entries that contain one of them. `--seed`, `--spread` and `--dtype` draw the weights
otherwise and put the words in another order; `keep` alone is run then, and the name tells how. `--sample N` takes N
entries that are not compiled, chosen by the seed.
"""

import argparse
import dataclasses
import functools
import json
import logging
import multiprocessing
import random
import traceback
import warnings
from pathlib import Path
from typing import Any, Final

from tests.zoo import census
from tests.zoo.judge import EXACT_WAYS, WAYS, Record, examine
from tests.zoo.redrawing import Redrawing
from tests.zoo.running import DEVIATION, SEED, TookTooLongError, at_most

SECONDS: Final = 300
"""Of processor time. No model takes longer, or it counts as wrong."""


def look_at(name: str, numbers: Redrawing) -> dict[str, Any]:
    """The record of one entry with these numbers; what raises is its only finding. A model that cannot do a type is
    no finding."""
    warnings.simplefilter("ignore")
    entry = numbers.of(census.entry(name))
    record = Record(entry.name, entry.family)
    try:
        with at_most(SECONDS):
            record = examine(entry, WAYS if numbers == Redrawing() else EXACT_WAYS)
    except TookTooLongError as limit:
        record.wrong.append(str(limit))
    except Exception as crash:
        where = traceback.extract_tb(crash.__traceback__)[-1]
        told = f"{type(crash).__name__}: {str(crash)[:150]} ({where.name})"
        if numbers.dtype == Redrawing().dtype:
            record.wrong.append(f"without foreshock: {told}")
        else:
            record.skipped["all"] = told
    return dataclasses.asdict(record)


def _write(target: Path, records: list[dict[str, Any]]) -> None:
    ordered = sorted(records, key=lambda record: str(record["name"]))
    target.write_text(json.dumps(ordered, indent=1) + "\n")


def _start() -> None:
    import torch

    torch.set_num_threads(1)
    logging.getLogger("foreshock").propagate = False  # what it says of each model stands in the record


def _right(target: Path) -> list[dict[str, Any]]:
    """What an earlier run wrote of entries that are right, and still live here or need a library that does not."""
    records = json.loads(target.read_text()) if target.exists() else []
    living = set(census.names())
    libraries_here = {name.split()[0] for name in living}
    return [
        record
        for record in records
        if not record["wrong"]
        and (record["name"].partition(" (seed")[0] in living or record["name"].split()[0] not in libraries_here)
    ]


def main(arguments: list[str]) -> int:
    """Run, write, and say how many are wrong."""
    parser = argparse.ArgumentParser(prog="python -P tests/zoo", description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--spread", type=float, default=DEVIATION, help="standard deviation of the weights")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--sample", type=int, help="how many entries, chosen by the seed; all without it")
    asked = parser.parse_intermixed_args(arguments)
    numbers = Redrawing(asked.seed, asked.spread, asked.dtype)
    records = _right(asked.record)
    done = {record["name"] for record in records}
    names = [n for n in census.names() if not asked.names or any(w in n for w in asked.names)]
    if asked.sample is not None:
        eager = [name for name in names if not name.endswith(", compiled")]
        names = random.Random(asked.seed).sample(eager, min(asked.sample, len(eager)))
    names = [name for name in names if f"{name}{numbers}" not in done]
    look = functools.partial(look_at, numbers=numbers)
    with multiprocessing.get_context("spawn").Pool(asked.processes, _start, maxtasksperchild=60) as pool:
        for number, record in enumerate(pool.imap_unordered(look, names)):
            records.append(record)
            if number % 5 == 0:
                _write(asked.record, records)
            if record["wrong"]:
                print(f"{number + 1}/{len(names)} {record['name']}: {record['wrong'][0]}", flush=True)
    _write(asked.record, records)
    wrong = [record for record in records if record["wrong"]]
    print(f"{len(wrong)} of {len(records)} are wrong; the zoo has {len(census.names())} entries")
    return 1 if wrong else 0
