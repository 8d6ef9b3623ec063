"""Public bug reports rebuilt on a small model: what foreshock says of each, compared with what it has to say.

`python -m tests.reports.public` trains every one of them, writes answers.csv, and prints the totals.
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
HEAD: Final = ["report", "its setting", "failure", "reported", "place", "advice"]
ANSWERS: Final = Path(__file__).parent / "answers.csv"
"""What foreshock answered when it was last asked, in the order of reports.toml."""


@dataclass(frozen=True, slots=True)
class Report:
    """One public report, and patterns of the words that answer it (reports.toml)."""

    address: str
    setting: str
    failure: str
    """natural or injected"""
    place: str
    advice: str
    false: str = r"(?!)"
    unseen: str = ""
    """the set of reports that were chosen before the product was changed for any of them; empty: it was tuned on it"""
    diverges: bool = False
    """whether the person saw a loss of twice the first one, and no NaN"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What foreshock reported of it."""

    words: str
    when: str
    place: bool
    advice: bool


def _read() -> tuple[Report, ...]:
    data = tomllib.loads((Path(__file__).parent / "reports.toml").read_text())
    patterns = data["patterns"]
    named = [{key: patterns.get(value, value) for key, value in each.items()} for each in data["report"]]
    return tuple(Report(**each) for each in named)


REPORTS: Final = _read()
SETS: Final = tuple(dict.fromkeys(report.unseen for report in REPORTS))
"""Of reports, in their order."""


def answer(report: Report) -> Answer:
    """Train it, and compare the first words with what the report needs."""
    found = SETTINGS[report.address]()
    unseen = re.search(r"[^\n]*see no key[^\n]*", found.table)
    step = 1 if unseen and not found.raised else found.raised[0].step if found.raised else None
    words = " ".join(filter(None, (unseen and unseen.group(), found.told, *found.later)))
    doubled = found.first_loss(lambda loss: not loss < 2 * found.losses[0])
    harmed = doubled if report.diverges else found.harmed
    when = "not" if step is None else "before" if step < harmed else "with" if step == harmed else "after"
    advice = bool(re.search(report.advice, words)) and not re.search(report.false, words)
    return Answer(words, when, bool(re.search(report.place, words)), advice)


def row(report: Report, found: Answer) -> list[str]:
    """Its line in ANSWERS."""
    place, advice = ("right" if right else "missed" for right in (found.place, found.advice))
    return [GITHUB + report.address, report.setting, report.failure, found.when, place, advice]


def summary(rows: list[list[str]]) -> str:
    """What docs/evidence.md says of these lines."""
    in_time = sum(when in ("before", "with") for *_, when, _, _ in rows)
    place, advice = (sum(line[column] == "right" for line in rows) for column in (-2, -1))
    return (
        f"Of {len(rows)} reports, foreshock reported {in_time} before the loss or with it. "
        f"It named the right place in {place} of them and gave the right advice in {advice}."
    )


if __name__ == "__main__":
    given = {each.address: answer(each) for each in REPORTS if re.search("|".join(sys.argv[1:]), each.address)}
    rows = {each.address: row(each, given[each.address]) for each in REPORTS if each.address in given}
    for unseen in SETS:
        print(summary([line for each in REPORTS if each.unseen == unseen and (line := rows.get(each.address))]))
    print(*(f"{address}: {found.words}" for address, found in given.items()), sep="\n", file=sys.stderr)
    if len(rows) == len(REPORTS):
        with ANSWERS.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([HEAD, *rows.values()])
