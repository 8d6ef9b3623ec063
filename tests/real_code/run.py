"""Runs public training code with foreshock and without, and writes the table in docs/models.md.

The command: `python -P scripts/run_tests_of.py real_code CLONES [NAME...]`, or `make real-code CLONES=FOLDER`. CLONES
is a folder that holds a clone of each repository as OWNER/NAME, bare or not; what is missing is named, with the line
that clones it.
Names limit the run to cases whose name begins so; the others keep what their last run found.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import torch
from tests.real_code.case import Case
from tests.real_code.cases import CASES
from tests.real_code.course import Course
from tests.real_code.judge import Verdict, judge
from tests.real_code.table import RECORD, write_table
from tests.real_code.training import train_one

ROOT: Final = Path(__file__).parents[2]
TRAIN: Final = "train"
SECONDS: Final = 900
"""Of one training, before it counts as hung."""

ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}


def look_at(case: Case, clones: Path) -> Verdict:
    """Train both ways, each in a process and a fresh copy of its own."""
    clone = clones / case.repository
    missing = Verdict(case.name, case.repository, "", case.model)
    if not clone.is_dir():
        missing.missing = f"no clone; git clone https://github.com/{case.repository} {clone}"
        return missing
    commit = _git(clone, "rev-parse", "--short=8", "HEAD").decode().strip()
    with tempfile.TemporaryDirectory() as folder:
        try:
            plain, watched = (_train(case, clone, way, Path(folder) / way) for way in ("without", "with"))
        except subprocess.SubprocessError as failed:
            return dataclasses.replace(missing, commit=commit, wrong=[str(failed)[-300:]])
    return judge(case, commit, plain, watched)


def _train(case: Case, clone: Path, way: str, folder: Path) -> Course:
    folder.mkdir()
    subprocess.run(["tar", "x", "-C", str(folder)], input=_snapshot(clone), check=True)
    found, log = folder.with_suffix(".pt"), folder.with_suffix(".log")
    command = [sys.executable, "-P", str(ROOT / "scripts" / "run_tests_of.py"), "real_code", TRAIN, case.name, way]
    command += [str(folder), str(found)]
    with log.open("w") as output:
        done = subprocess.run(
            command,
            env=os.environ | ENVIRONMENT,
            stdout=output,
            stderr=output,
            timeout=SECONDS,
            cwd=folder,
            check=False,
        )
    if not found.exists():
        raise subprocess.SubprocessError(f"{way}: status {done.returncode}: {log.read_text()[-250:]}")
    course = torch.load(found, weights_only=False)  # the process above wrote it
    assert isinstance(course, Course)
    return course


def _snapshot(clone: Path) -> bytes:
    """The newest commit as a tar archive, without files that the clone lacks, as one without large files does."""
    listed = [line.split("\t") for line in _git(clone, "ls-tree", "-r", "HEAD").decode().splitlines()]
    names = "\n".join(about.split()[2] for about, _ in listed).encode()
    held = _git(clone, "cat-file", "--batch-check", given=names).decode().splitlines()
    lacking = [path for (_, path), state in zip(listed, held, strict=True) if state.endswith("missing")]
    return _git(clone, "archive", "HEAD", "--", ".", *(f":(exclude,literal){path}" for path in lacking))


def _git(clone: Path, *arguments: str, given: bytes = b"") -> bytes:
    return subprocess.run(["git", "-C", str(clone), *arguments], input=given, capture_output=True, check=True).stdout


def _write(verdicts: list[Verdict]) -> None:
    RECORD.write_text(json.dumps([dataclasses.asdict(verdict) for verdict in verdicts], indent=1) + "\n")
    write_table(verdicts)


def main(arguments: list[str]) -> int:
    """Run, write, and say how many are wrong; with TRAIN first, one training in this process."""
    if arguments[:1] == [TRAIN]:
        train_one(arguments[1:])
        return 0
    parser = argparse.ArgumentParser(prog="run_tests_of.py real_code", description=__doc__)
    parser.add_argument("clones", type=Path, help="the folder of clones")
    parser.add_argument("names", nargs="*", help="beginnings of cases' names; all without it")
    asked = parser.parse_args(arguments)
    before = json.loads(RECORD.read_text()) if RECORD.exists() else []
    verdicts = {verdict["name"]: Verdict(**verdict) for verdict in before}
    for case in CASES.values():
        if not asked.names or any(case.name.startswith(name) for name in asked.names):
            verdicts[case.name] = verdict = look_at(case, asked.clones.resolve())
            print(case.name, verdict.missing or verdict.wrong or "good", sep=": ", flush=True)
            _write([verdicts[name] for name in CASES if name in verdicts])
    ordered = list(verdicts.values())
    wrong, missing = (sum(bool(getattr(v, what)) for v in ordered) for what in ("wrong", "missing"))
    print(f"{len(ordered)} cases: {wrong} wrong, {missing} that did not run")
    return 1 if wrong or missing else 0
