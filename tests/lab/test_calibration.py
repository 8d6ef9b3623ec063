"""How often a forecast held: what was foreseen against what came."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.lab.made_up import HEADS, record

from foreshock.contract import wire
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.scoring.calibration import calibration, forecasts_of


def said(name: str, step: int, state: Any = "raised", cause: Any = "rounding", **more: Any) -> wire.Verdict:
    """About layer 0 and the head that the last letter of `name` counts."""
    fields: dict[str, Any] = {"severity": "warning", "layer": 0, "head": ord(name[-1]) - ord("a"), "signal": "offset"}
    fields |= {"evidence": {}, "sentence": "", "forecast_steps": None} | more
    for end in ("low", "high"):
        fields.setdefault(f"forecast_{end}_steps", None)
    return wire.Verdict(id=name, step=step, state=state, cause=cause, **fields)


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
