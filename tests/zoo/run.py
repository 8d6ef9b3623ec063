"""Runs the zoo in several processes and writes the result of each model.

The command: `python -P tests/zoo RECORD [--processes 3] [NAME...]`.

RECORD is the JSON file to write. Entries that it already contains without errors are not run again, so a stopped run
can be continued. Names limit the run to entries that contain one of them. `--seed`, `--spread` and `--dtype` draw other
weights and change the token order; then only `keep` is run, and the entry name shows the numbers. `--sample N` selects
N uncompiled entries by the seed.
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
from tests.zoo.judge import BIT_IDENTICAL_WAYS, WAYS, Record, examine
from tests.zoo.redrawing import Redrawing
from tests.zoo.running import DEVIATION, SEED, TimeLimitExceededError, time_limit

SECONDS: Final = 300
"""Limit of CPU time per model; a model that takes longer counts as wrong."""


def examine_entry(name: str, numbers: Redrawing) -> dict[str, Any]:
    """The record of one entry with these numbers. An exception is recorded as its only error, except that a model may
    not support a dtype."""
    warnings.simplefilter("ignore")
    entry = numbers.of(census.entry(name))
    record = Record(entry.name, entry.family)
    try:
        with time_limit(SECONDS):
            record = examine(entry, WAYS if numbers == Redrawing() else BIT_IDENTICAL_WAYS)
    except TimeLimitExceededError as timeout:
        record.wrong.append(str(timeout))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {str(error)[:150]} ({frame.name})"
        if numbers.dtype == Redrawing().dtype:
            record.wrong.append(f"without foreshock: {message}")
        else:
            record.skipped["all"] = message
    return dataclasses.asdict(record)


def _write(target: Path, records: list[dict[str, Any]]) -> None:
    ordered = sorted(records, key=lambda record: str(record["name"]))
    target.write_text(json.dumps(ordered, indent=1) + "\n")


def _start() -> None:
    import torch

    torch.set_num_threads(1)
    logging.getLogger("foreshock").propagate = False  # its messages are in the record


def _correct_records(target: Path) -> list[dict[str, Any]]:
    """Correct records of an earlier run whose entry still exists or whose library is not installed here."""
    records = json.loads(target.read_text()) if target.exists() else []
    existing = set(census.names())
    installed_libraries = {name.split()[0] for name in existing}
    return [
        record
        for record in records
        if not record["wrong"]
        and (record["name"].partition(" (seed")[0] in existing or record["name"].split()[0] not in installed_libraries)
    ]


def main(arguments: list[str]) -> int:
    """Run the entries, write the records, and print how many are wrong."""
    parser = argparse.ArgumentParser(prog="python -P tests/zoo", description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--spread", type=float, default=DEVIATION, help="standard deviation of the weights")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--sample", type=int, help="number of entries, chosen by the seed; default: all")
    options = parser.parse_intermixed_args(arguments)
    numbers = Redrawing(options.seed, options.spread, options.dtype)
    records = _correct_records(options.record)
    done = {record["name"] for record in records}
    names = [n for n in census.names() if not options.names or any(w in n for w in options.names)]
    if options.sample is not None:
        eager = [name for name in names if not name.endswith(", compiled")]
        names = random.Random(options.seed).sample(eager, min(options.sample, len(eager)))
    names = [name for name in names if f"{name}{numbers}" not in done]
    look = functools.partial(examine_entry, numbers=numbers)
    with multiprocessing.get_context("spawn").Pool(options.processes, _start, maxtasksperchild=60) as pool:
        for number, record in enumerate(pool.imap_unordered(look, names)):
            records.append(record)
            if number % 5 == 0:
                _write(options.record, records)
            if record["wrong"]:
                print(f"{number + 1}/{len(names)} {record['name']}: {record['wrong'][0]}", flush=True)
    _write(options.record, records)
    wrong = [record for record in records if record["wrong"]]
    print(f"{len(wrong)} of {len(records)} are wrong; the zoo has {len(census.names())} entries")
    return 1 if wrong else 0
