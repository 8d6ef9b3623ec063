"""The table in docs/models.md, made of the record."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.real_code.judge import Verdict

_ROOT: Final = Path(__file__).parents[2]
PAGE: Final = _ROOT / "docs" / "models.md"
RECORD: Final = _ROOT / "src/foreshock/benchmarks" / "results" / "real_code.json"
BEGINS, ENDS = "<!-- real code begins -->", "<!-- real code ends -->"
_HEAD: Final = ("repository", "model", "monitored layers", "verdict")


def table_of(verdicts: Sequence[Verdict]) -> str:
    """A line for each case."""
    rows = [_HEAD, tuple("---" for _ in _HEAD), *map(_row, verdicts)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def _row(verdict: Verdict) -> tuple[str, ...]:
    watched, _, true = verdict.watched.partition(", true ")
    return (
        verdict.repository,
        verdict.model,
        watched if watched == true else verdict.watched,
        f"did not run: {verdict.missing}" if verdict.missing else "; ".join(verdict.wrong) or "good",
    )


def write_table(verdicts: Sequence[Verdict]) -> None:
    """Put the table between its marks."""
    before, _, rest = PAGE.read_text().partition(BEGINS)
    _, _, after = rest.partition(ENDS)
    PAGE.write_text(f"{before}{BEGINS}\n{table_of(verdicts)}\n{ENDS}{after}")
