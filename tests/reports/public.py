"""Public bug reports rebuilt on a small model, and foreshock's warnings compared with the expected ones.

`python -m tests.reports.public` trains all of them, writes answers.csv, and prints the totals.
"""

import csv
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.reports.settings import SETTINGS

GITHUB: Final = "https://github.com/"
HEADER: Final = ["report", "its setting", "failure", "reported", "place", "advice"]
ANSWERS: Final = Path(__file__).parent / "answers.csv"
"""The recorded results, in the order of reports.toml."""


@dataclass(frozen=True, slots=True)
class Report:
    """One public report, and patterns that a correct warning matches (reports.toml)."""

    address: str
    setting: str
    failure: str
    """natural or injected"""
    place: str
    advice: str
    false: str = r"(?!)"
    unseen: str = ""
    """name of the held-out set that has this report; empty if foreshock was tuned on it"""
    diverges: bool = False
    """whether the reported failure is a loss of twice the first one, without NaN"""


@dataclass(frozen=True, slots=True)
class Answer:
    """foreshock's warning about a report, and whether it is correct."""

    words: str
    when: str
    place: bool
    advice: bool


def _read() -> tuple[Report, ...]:
    data = tomllib.loads((Path(__file__).parent / "reports.toml").read_text())
    patterns = data["patterns"]
    entries = [{key: patterns.get(value, value) for key, value in entry.items()} for entry in data["report"]]
    return tuple(Report(**entry) for entry in entries)


REPORTS: Final = _read()
SETS: Final = tuple(dict.fromkeys(report.unseen for report in REPORTS))
"""Names of the sets of reports, in order."""


def answer(report: Report) -> Answer:
    """Train the report's setting, and compare the first warning with the patterns."""
    outcome = SETTINGS[report.address]()
    unseen = re.search(r"[^\n]*see no key[^\n]*", outcome.table)
    step = 1 if unseen and not outcome.raised else outcome.raised[0].step if outcome.raised else None
    words = " ".join(filter(None, (unseen and unseen.group(), outcome.first_text, *outcome.later_texts)))
    doubled_step = outcome.first_loss(lambda loss: not loss < 2 * outcome.losses[0])
    failure_step = doubled_step if report.diverges else outcome.failure_step
    when = "not" if step is None else "before" if step < failure_step else "with" if step == failure_step else "after"
    advice = bool(re.search(report.advice, words)) and not re.search(report.false, words)
    return Answer(words, when, bool(re.search(report.place, words)), advice)


def row(report: Report, result: Answer) -> list[str]:
    """The line of a report in ANSWERS."""
    place, advice = ("right" if right else "missed" for right in (result.place, result.advice))
    return [GITHUB + report.address, report.setting, report.failure, result.when, place, advice]


def summary(rows: list[list[str]]) -> str:
    """The sentence for these lines in docs/evidence.md."""
    in_time = sum(when in ("before", "with") for *_, when, _, _ in rows)
    place, advice = (sum(line[column] == "right" for line in rows) for column in (-2, -1))
    return (
        f"Of {len(rows)} reports, foreshock reported {in_time} before the loss or with it. "
        f"It named the right place in {place} of them and gave the right advice in {advice}."
    )


if __name__ == "__main__":
    answers = {entry.address: answer(entry) for entry in REPORTS if re.search("|".join(sys.argv[1:]), entry.address)}
    rows = {entry.address: row(entry, answers[entry.address]) for entry in REPORTS if entry.address in answers}
    for unseen in SETS:
        print(summary([line for entry in REPORTS if entry.unseen == unseen and (line := rows.get(entry.address))]))
    print(*(f"{address}: {outcome.words}" for address, outcome in answers.items()), sep="\n", file=sys.stderr)
    if len(rows) == len(REPORTS):
        with ANSWERS.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([HEADER, *rows.values()])
