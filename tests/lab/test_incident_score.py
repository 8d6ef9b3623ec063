"""Incidents of a recorded run, the head that fails, forecasts against what came, and the noise of a recipe."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lab.made_up import HEADS, noisy, record, steps

from foreshock.contract import wire
from foreshock.lab.recording.trace import Steps, read_trace
from foreshock.lab.scoring.calibration import calibration, forecasts_of
from foreshock.lab.scoring.forecast_table import SHIPPED, Took, forecast_rows, took
from foreshock.lab.scoring.harm import first_harm
from foreshock.lab.scoring.incident_table import group_of, incident_rows
from foreshock.lab.scoring.incidents import Opened, failing_head, opened, told_at
from foreshock.lab.scoring.noise import calibrated_limits, controls_of, limits_of_recipes
from foreshock.lab.scoring.report import lab_score

LAB = Path(__file__).parents[2] / "lab"


def said(name: str, step: int, state: Any = "raised", cause: Any = "rounding", **more: Any) -> wire.Verdict:
    """About layer 0 and the head that the last letter of `name` counts."""
    fields: dict[str, Any] = {"severity": "warning", "layer": 0, "head": ord(name[-1]) - ord("a"), "signal": "offset"}
    fields |= {"evidence": {}, "sentence": "", "forecast_steps": None} | more
    for end in ("low", "high"):
        fields.setdefault(f"forecast_{end}_steps", None)
    return wire.Verdict(id=name, step=step, state=state, cause=cause, **fields)


def test_heads_of_one_cause_are_one_incident_until_all_of_them_are_quiet() -> None:
    story = [
        said("a", 100, forecast_steps=400.0),
        said("b", 150),
        said("c", 200, cause="score growth"),
        said("a", 300, "cleared"),
        said("d", 350),
        said("b", 400, "cleared"),
        said("d", 500, "cleared"),
        said("e", 700, forecast_steps=math.inf),
        said("note", 750, cause="other", severity="info"),
    ]
    assert opened(story) == [
        Opened(100, "rounding", 500),
        Opened(200, "score growth", None),
        Opened(700, "rounding", 1_000_000_700),
    ]
    assert opened([]) == []


def test_a_cause_that_is_corrected_opens_no_second_incident() -> None:
    story = [said("a", 100, cause="score growth"), said("a", 200, "updated"), said("b", 300, cause="score growth")]
    assert opened(story) == [
        Opened(100, "rounding", None, corrected_from="score growth"),
        Opened(300, "score growth", None),
    ]


def test_a_correction_of_one_head_of_several_leaves_the_others_where_they_were() -> None:
    both = [said("a", 100, cause="score growth"), said("b", 150, cause="score growth")]
    assert opened([*both, said("a", 200, "updated")]) == [
        Opened(100, "score growth", None),
        Opened(200, "rounding", None),
    ]
    into = [said("c", 50), *both, said("a", 200, "updated"), said("b", 250, "updated")]
    assert opened(into) == [Opened(50, "rounding", None), Opened(100, "score growth", None)]


def test_what_was_told_at_a_step_names_the_heads_that_come_to_harm_first() -> None:
    story = [
        said("a", 100, forecast_steps=900.0),
        said("b", 150, forecast_steps=100.0),
        said("c", 160),
        said("d", 170, forecast_steps=500.0),
        said("c", 900, "updated", forecast_steps=1.0),
    ]
    told = told_at(story, 500)
    assert told is not None
    assert (told.cause, told.heads) == ("rounding", [(0, 1), (0, 3), (0, 0)])
    later = told_at(story, 900)
    assert later is not None
    assert (0, 2) in later.heads
    assert told_at(story, 99) is None
    assert told_at([*story[:1], said("a", 300, "cleared")], 400) is None


def test_the_head_that_fails_is_the_first_past_512_or_the_one_that_drifted_farthest_at_the_harm(tmp_path: Path) -> None:
    failing = read_trace(record(tmp_path / "f.jsonl.gz", fails=True))
    healthy = read_trace(record(tmp_path / "h.jsonl.gz", fails=False))
    assert failing_head(failing, None) == (0, 1)
    assert failing_head(healthy, None) is None
    assert failing_head(healthy, 3000) is None or failing_head(healthy, 3000) == (0, 1)
    assert len(failing.heads) == HEADS


def test_a_forecast_is_inside_its_range_before_it_after_it_or_not_yet_decided(tmp_path: Path) -> None:
    trace = read_trace(record(tmp_path / "f.jsonl.gz", fails=True))  # head 1 reaches 512 near step 5620
    end = trace.samples[-1].step
    [reached] = {each.reached_step for each in forecasts_of(trace, [said("b", 2000)])}
    assert reached is not None
    assert 5000 < reached < end
    left = reached - 2000.0
    for low, high, outcome in (
        (left - 1, left + 1, "inside"),
        (left + 1, left + 9, "earlier"),
        (left - 9, left - 1, "later"),
        (left - 1, None, "inside"),
        (left + 1, None, "earlier"),
        (None, None, "none in sight, wrong"),
    ):
        story = [said("b", 2000, forecast_low_steps=low, forecast_high_steps=high, harm_in_sight=low is not None)]
        assert [each.outcome for each in forecasts_of(trace, story)] == [outcome]
    for high, outcome in ((end - 2000.0, "undecided"), (end - 2001.0, "later")):
        story = [said("a", 2000, forecast_steps=1.0, forecast_low_steps=1.0, forecast_high_steps=high)]
        assert [each.outcome for each in forecasts_of(trace, story)] == [outcome]
    calm = {"harm_in_sight": False}
    past = forecasts_of(trace, [said("b", reached), said("a", 100, **calm), said("c", 9), said("a", 9, "updated")])
    assert [each.outcome for each in past] == ["past", "none in sight, right", "no forecast"]
    never = said("a", 2000, forecast_steps=1.0, forecast_low_steps=1.0)
    assert [each.outcome for each in forecasts_of(trace, [never])] == ["undecided"]
    held = forecasts_of(trace, [said("b", 2000, forecast_low_steps=0.0, forecast_high_steps=left)])
    counted = calibration([*past, *held])
    assert (counted["decided"], counted["share_inside"]) == (1, 1.0)
    assert calibration([])["share_inside"] is None
    early = forecasts_of(trace, [said("b", 2000, forecast_low_steps=left + 1)])
    both = calibration([*early, *held])
    assert (both["share_inside"], both["with_latest"]["share_inside"]) == (0.5, 1.0)


def test_a_forecast_is_checked_until_its_head_is_switched(tmp_path: Path) -> None:
    trace = read_trace(record(tmp_path / "f.jsonl.gz", fails=True))
    place = next(at for at, sample in enumerate(trace.samples) if sample.step >= 4000)
    modes = np.array([0, 1] + [0] * (HEADS - 2), dtype=np.int32)
    switched = [s.model_copy(update={"modes": wire.Array.of(modes)}) for s in trace.samples[place:]]
    cured = replace(trace, events=[*trace.samples[:place], *switched])
    story = [said("b", 2000, forecast_steps=1.0, forecast_low_steps=1.0)]
    for high, outcome in ((1500.0, "later"), (2500.0, "undecided")):
        told = [story[0].model_copy(update={"forecast_high_steps": high})]
        [found] = forecasts_of(cured, told)
        assert (found.outcome, found.reached_step) == (outcome, None)
        assert 3900 <= found.seen_until < 4000
    [left] = forecasts_of(trace, story)
    assert left.outcome == "inside"


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


def part(size: float, seed: int) -> tuple[Steps, Steps]:
    """Two runs of the same whose losses wander apart by up to `size`, as a share, for hundreds of steps."""
    walk = np.repeat(np.random.default_rng(seed).uniform(-1, 1, size=8), 750)
    both = noisy(2.0, seed=seed)
    return steps(both), steps(both * (1 + size * walk))


def test_limits_follow_the_noise_of_a_recipe_and_no_control_is_harmed_by_another() -> None:
    quiet = calibrated_limits([part(0.0, 1), part(0.0, 1)[::-1]])
    assert (quiet.loss_excess, quiet.grad_norm_factor) == (0.005, 1.2)
    found = []
    for size in (0.01, 0.04):
        pairs = [pair for seed in (1, 2, 3) for pair in (part(size, seed), part(size, seed)[::-1])]
        limits = calibrated_limits(pairs)
        assert all(first_harm(one, other, limits) is None for one, other in pairs)
        assert size < limits.loss_excess < 3 * size
        found.append(limits.loss_excess)
    assert found[1] > 2 * found[0]
    calm = noisy(2.0)
    apart = steps(calm * (1 + 0.04 * (np.arange(len(calm)) >= 3000))), steps(calm)
    assert first_harm(*apart) is not None  # the fixed limit takes this noise for harm
    assert first_harm(*apart, calibrated_limits([apart])) is None


def test_controls_made_twice_give_their_recipe_its_own_limits(tmp_path: Path) -> None:
    once = record(tmp_path / "once.jsonl.gz", fails=False, recipe="calm")
    arms = ("control", "control-again")
    pair = [record(tmp_path / f"{arm}.jsonl.gz", fails=False, recipe="other", arm=arm) for arm in arms]
    controls = controls_of(map(read_trace, [once, *pair]))
    assert set(limits_of_recipes(controls)) == {"other"}
    loss = noisy(2.0, seed=1)
    loss[4000:] *= 1.015  # within the fixed limit, beyond that of a recipe without noise
    failing = tmp_path / "failing.jsonl.gz"
    record(failing, fails=True, recipe="other")
    scores, _ = lab_score([failing, *pair])
    assert scores[0].harm_limits is not None
    assert scores[0].harm_limits.loss_excess == 0.005
    assert scores[0].harm_step == 5001
    assert first_harm(steps(loss), read_trace(pair[0]).steps, scores[0].harm_limits) is not None
    assert first_harm(steps(loss), read_trace(pair[0]).steps) is None


@pytest.mark.parametrize(
    ("header", "fails", "group"),
    [
        ({}, False, "healthy"),
        ({"truth": "rounding"}, False, "did not fail"),
        ({}, True, "failed"),
        ({"nature": "injected"}, True, "other"),
        ({"truth": "score growth"}, True, "other"),
        ({"truth": "healthy", "arm": "exact-delta"}, False, "treated"),
    ],
)
def test_runs_are_grouped_by_what_became_of_them(
    tmp_path: Path, header: dict[str, Any], fails: bool, group: str
) -> None:
    [score], result = lab_score([record(tmp_path / "run.jsonl.gz", fails=fails, **header)])
    assert group_of(score) == group
    [row] = incident_rows([score])
    assert (row.group, row.runs, row.quiet_runs) == (group, 1, 0 if fails else 1)
    assert (row.false_per_500k is None) == (group in ("failed", "other"))
    assert result["incidents"][0]["group"] == group
