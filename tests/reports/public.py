"""Public bug reports rebuilt on a small model: what foreshock says of each, compared with what it has to say.

`python -m tests.reports.public` trains every one of them and prints the tables of docs/evidence.md.
"""

import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.reports.settings import SETTINGS

GITHUB: Final = "https://github.com/"
HEAD: Final = """| report | its setting | failure | reported | place | advice |
|---|---|---|---|---|---|"""


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
"""The tables of docs/evidence.md, in their order."""


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


def row(report: Report, found: Answer) -> str:
    """Its line in the table."""
    name = report.address.replace("/issues/", "#").replace("/pull/", "#")
    place, advice = ("right" if right else "**missed**" for right in (found.place, found.advice))
    where = f"[{name}]({GITHUB}{report.address})"
    return f"| {where} | {report.setting} | {report.failure} | {found.when} | {place} | {advice} |"


def summary(rows: list[str]) -> str:
    """The sentence above a table of these lines."""
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")][-3:] for line in rows]
    in_time = sum(when in ("before", "with") for when, _, _ in cells)
    place, advice = (sum(each[column] == "right" for each in cells) for column in (1, 2))
    return (
        f"Of {len(rows)} reports, foreshock reported {in_time} before the loss or with it. "
        f"It named the right place in {place} of them and gave the right advice in {advice}."
    )


if __name__ == "__main__":
    for unseen in SETS:
        chosen = [each for each in REPORTS if each.unseen == unseen and re.search("|".join(sys.argv[1:]), each.address)]
        answers = [(each, answer(each)) for each in chosen]
        rows = [row(*each) for each in answers]
        print(summary(rows), "", HEAD, *rows, "", sep="\n")
        print(*(f"{each.address}: {found.words}" for each, found in answers), sep="\n", file=sys.stderr)
