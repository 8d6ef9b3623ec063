"""What every condition of the detectors gives and costs: the tuning runs scored without it, one condition at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from foreshock.lab.recording.trace import Trace
from foreshock.lab.scoring.incident_table import incident_rows
from foreshock.lab.scoring.score import OURS, score_traces, split
from foreshock.lab.scoring.table import row
from foreshock.monitor.detect.detectors import DetectorConfig

_NEVER: Final = 1e9
VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "as shipped": {},
    "without peers": {"peer_excess": 0.0},
    "without more growth from young runs": {"settle_steps": 0},
    "more growth from young runs until step 10,000": {"settle_steps": 10_000},
    "without growth that goes on": {"share_of_newer_half": 0.0},
    "growth that compounds": {"share_of_newer_half": 0.55},
    "without the noise of a block": {"noise_multiple": 0.0},
    "one block is enough": {"persist_blocks": 1},
    "without the delta bias": {"support_chance": 1e-300},
    "heads that sharpen too": {"shared_part": 0.0},
    "a score of 128 is enough": {"score_level": 128.0},
    "without the score": {"score_level": _NEVER},
    "without ties": {"tied_growth": _NEVER},
    "without the norm": {"norm_growth": _NEVER},
    "harm however far off": {"horizon_lives": None},
    "harm within 10 lives": {"horizon_lives": 10.0},
    "harm within 5 lives": {"horizon_lives": 5.0},
    "harm within 2 lives": {"horizon_lives": 2.0},
}
"""Fields of DetectorConfig that differ from the shipped ones, by what they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRow:
    """One variant on the tuning runs."""

    variant: str
    healthy_steps: int
    false_alarms: int
    """heads warned about in healthy runs"""
    false_incidents: int
    """in runs that are healthy, were treated or did not fail, but for undecided ones"""
    quiet_runs: int
    """healthy ones without any incident"""
    healthy_runs: int
    failures: int
    warned: int
    in_time: int
    median_lead_steps: float | None
    drifting_warned: int
    """runs that were made to fail and did not, with an incident"""
    drifting: int


def ablation(traces: Sequence[Trace], on_variant: Callable[[str], None] = lambda name: None) -> list[AblationRow]:
    """A row for each of VARIANTS. Held-out runs are left out. Raises ValueError where no tuning run is given."""
    tuning = [trace for trace in traces if split(trace) == "tuning"]
    if not tuning:
        raise ValueError("none of these runs is for tuning; an ablation looks at no held-out run")
    found = []
    for name, fields in VARIANTS.items():
        scores = score_traces(tuning, DetectorConfig(**fields), baselines=())
        shipped = row(scores, OURS, 1.0, "shipped", "tuning")
        groups = {each.group: each for each in incident_rows(scores)}
        wrong = [groups[group] for group in ("healthy", "treated", "did not fail") if group in groups]
        healthy, drifting = groups.get("healthy"), groups.get("did not fail")
        found.append(
            AblationRow(
                variant=name,
                healthy_steps=shipped.healthy_steps,
                false_alarms=shipped.false_alarms,
                false_incidents=sum(each.incidents - each.undecided for each in wrong),
                quiet_runs=healthy.quiet_runs if healthy else 0,
                healthy_runs=healthy.runs if healthy else 0,
                failures=shipped.failures,
                warned=shipped.warned,
                in_time=shipped.in_time,
                median_lead_steps=shipped.median_lead_steps,
                drifting_warned=drifting.runs - drifting.quiet_runs if drifting else 0,
                drifting=drifting.runs if drifting else 0,
            )
        )
        on_variant(name)
    return found
