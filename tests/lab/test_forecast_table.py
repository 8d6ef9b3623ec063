"""How long warned heads took, of which the ranges of forecasts are made."""

from pathlib import Path

import pytest

from foreshock.lab.recording.trace import read_trace
from foreshock.lab.scoring.forecast_table import SHIPPED, Took, forecast_rows, took

LAB = Path(__file__).parents[2] / "lab"


def test_forecasts_are_calibrated_by_the_heads_of_other_recipes_alone() -> None:
    def head(recipe: str, part: float, *, came: bool = True, open_ended: bool = False, first: bool = True) -> Took:
        return Took(recipe, f"{recipe}-run", (0, 1), first, part, came, open_ended)

    words = [
        *(head("a", 0.5), head("a", 2.0, first=False), head("a", 9.0, came=False)),
        *(head("b", 1.0), head("b", 3.0, open_ended=True, first=False), head("b", 4.0, came=False, open_ended=True)),
    ]
    first, second, shipped = forecast_rows(words)
    assert (first.recipe, first.earliest, first.latest) == ("a", 1.0, 3.0)
    assert (first.heads, first.forecasts, first.inside, first.first_inside, first.passed) == (1, 2, 1, 0, 1)
    assert (second.earliest, second.latest, second.inside, second.passed) == (0.5, 2.0, 2, 0)
    assert (shipped.heads, shipped.forecasts) == (2, 4)
    with pytest.raises(ValueError, match="fewer than two recipes"):
        forecast_rows(words[:3])


@pytest.mark.full
def test_the_shipped_parts_enclose_what_every_head_of_the_tuning_runs_took() -> None:
    """Of the heads of every recipe, the range that the others give holds for four in five forecasts."""
    runs = sorted(path for folder in (".", "cure", "rescue") for path in (LAB / "traces" / folder).glob("*.gz"))
    rows = forecast_rows(took([read_trace(path) for path in runs if not path.name.startswith("healthy")]))
    judged = [row for row in rows if row.recipe != SHIPPED]
    assert sum(row.inside for row in judged) >= 0.8 * sum(row.forecasts for row in judged)
    assert rows[-1].earliest <= min(row.earliest for row in judged)
    assert rows[-1].latest >= max(row.latest for row in judged)
