"""What a cure does to runs: every recorded run beside its float32 control, and a table of them.

Of each run: `excess`, the share by which its mean loss over its last 1000 steps lies above the control's over the same
steps (over the last that both made, where one is shorter; None without a control); `harm_step`, the first harm
(`foreshock.lab.scoring.harm`); `offset_end`, the largest |score offset| of any head at the end, in nats; `score_after`,
the largest |score| of any head in a sample taken wholly after the first switch, of the whole run where nothing was
switched; `common_share`, of the head whose offset is largest when the run was last probed, the part of that offset that
all keys give alike (`foreshock.lab.training.null_part`, common_mean); `key_bias`, the largest |b_K| of a head then.
What a head's statistics say while centred keys are on is about the centred scores; the last two are about the raw ones.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from foreshock.contract import catalog, wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.lab.recording.trace import Trace, read_trace
from foreshock.lab.scoring.courses import excess_over, final_offset
from foreshock.lab.scoring.harm import AGAINST_CONTROL, Limits, first_harm
from foreshock.lab.scoring.noise import controls_of, limits_of_recipes
from foreshock.lab.training.arm import CONTROL, PAPER, RESCUED, UNTREATED
from foreshock.monitor.detect.signals import DANGEROUS_SCORE

SHIPPED: Final = "shipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CuredRun:
    """One run of benchmarks/results/cure.json."""

    recipe: str
    seed: int
    arm: str
    policy: str
    """"shipped" where the agent switched by itself as it does by default, "auto" where it switched to something else or
    more, "observe" where it only watched"""
    switch_step: int | None
    """after which step heads were first switched; 0 from the start, None where none was"""
    when: str
    """"start", "never", "by the agent", or the milestone of its trunk at which a branch was switched"""
    excess: float | None
    harm_step: int | None
    offset_end: float
    score_after: float
    common_share: float | None
    key_bias: float | None
    steps: int
    """the last one"""


def cured_runs(paths: Iterable[Path]) -> list[CuredRun]:
    """The runs of `paths` by recipe, arm and seed. Raises ValueError for a file that is no trace, and for two runs of
    one recipe, arm and seed."""
    traces = [read_trace(path) for path in paths]
    keys = [tuple(trace.header.get(name) for name in ("recipe", "arm", "seed")) for trace in traces]
    if twice := {key for key in keys if keys.count(key) > 1}:
        recipe, arm, seed = sorted(twice, key=str)[0]
        raise ValueError(f"{recipe}, arm {arm}, seed {seed} is given twice; give one trace of each run")
    controls = {(k[0], k[2]): trace for k, trace in zip(keys, traces, strict=True) if k[1] == CONTROL.name}
    limits = limits_of_recipes(controls_of(traces))
    runs = [
        _cured(trace, controls.get((key[0], key[2])), limits.get(str(key[0]), AGAINST_CONTROL))
        for key, trace in zip(keys, traces, strict=True)
    ]
    return sorted(runs, key=lambda run: (run.recipe, run.arm, run.seed))


def _cured(trace: Trace, control: Trace | None, limits: Limits) -> CuredRun:
    control = None if control is trace else control
    switched = _first_switch(trace)
    since = trace.steps.only(trace.steps.step - trace.steps.span >= (switched or 0))
    harm = first_harm(since, None if control is None else control.steps, limits)
    share, key_bias = _null_part(trace)
    return CuredRun(
        recipe=str(trace.header.get("recipe", trace.path.name)),
        seed=int(trace.header.get("seed", 0)),
        arm=str(trace.header.get("arm", "")),
        policy=_policy(trace),
        switch_step=switched,
        when=_when(trace, switched),
        excess=None if control is None else excess_over(trace.steps, control.steps),
        harm_step=None if harm is None else harm.step,
        offset_end=final_offset(trace),
        score_after=_largest_score(trace, switched or 0),
        common_share=share,
        key_bias=key_bias,
        steps=int(trace.steps.step[-1]),
    )


def _first_switch(trace: Trace) -> int | None:
    steps = (e.step for e in trace.events if isinstance(e, wire.Switched) and e.outcome == "applied" and e.heads)
    return next(steps, None)


def _policy(trace: Trace) -> str:
    policy = trace.header.get("policy", "auto" if str(trace.header.get("arm", "")).endswith("rescued") else "observe")
    told = (trace.header.get("mitigation"), trace.header.get("switch_scope"))
    return SHIPPED if policy == "auto" and told == (RESCUED.mitigation, RESCUED.switch_scope) else str(policy)


def _when(trace: Trace, switched: int | None) -> str:
    if "when" in trace.header:
        return str(trace.header["when"])
    if switched is None:
        return "never"
    return "start" if switched == 0 else "by the agent"


def _largest_score(trace: Trace, since: int) -> float:
    """NaN where no sample was taken since."""
    scores = [
        float(np.max(slot_values(words, Slot.ROW_MAX_ABS)))
        for sample in trace.samples
        if sample.since_step >= since and (words := sample.words()) is not None
    ]
    return max(scores, default=float("nan"))


def _null_part(trace: Trace) -> tuple[float | None, float | None]:
    """Share of the common part in the largest offset, and the largest key bias, at the last probe of them."""
    probe = next((each for each in reversed(trace.probes) if "common_mean" in each.values), None)
    if probe is None:
        return None, None
    key_bias = float(np.max(probe.values["key_bias_norm"]))
    offsets = [
        catalog.read("head.score_offset", words)
        for sample in trace.samples
        if sample.since_step < probe.step <= sample.step and (words := sample.words()) is not None
    ]
    if not offsets or not np.isfinite(offsets[0]).all():
        return None, key_bias
    head = int(np.argmax(np.abs(offsets[0])))
    return float(probe.values["common_mean"][head] / offsets[0][head]), key_bias


def as_json(runs: Sequence[CuredRun]) -> dict[str, Any]:
    """What benchmarks/results/cure.json holds; a number that is none is null."""

    def number(value: Any) -> Any:
        return None if isinstance(value, float) and not np.isfinite(value) else value

    return {"runs": [{name: number(value) for name, value in asdict(run).items()} for run in runs]}


@dataclass(frozen=True, slots=True, kw_only=True)
class CureRow:
    """The runs of one recipe and arm, whatever their seed."""

    recipe: str
    arm: str
    when: str
    policy: str
    runs: int
    failed: int
    """runs that were harmed or reached a |score| of 512 after the switch"""
    chance: float | None
    """probability that so few of these runs fail or fewer, were they as likely to fail as those of their recipe and
    numerics where nothing is done: Fisher's exact test. None for branches, which start from runs that were chosen"""
    harmed: int
    dangerous: int
    """runs with a |score| of 512 or more after the switch"""
    excess: float | None
    """median over the runs that have a control"""
    worst_excess: float | None
    worst_offset: float
    worst_score: float
    common_share: float | None
    """median over the runs that recorded it"""
    key_bias: float | None
    """largest of all runs"""


def table(runs: Sequence[CuredRun]) -> list[CureRow]:
    """One row for each recipe and arm, in the order of `runs`."""
    untreated = {
        arm: {
            recipe: [run for run in runs if (run.recipe, run.arm) == (recipe, arm)]
            for recipe in {r.recipe for r in runs}
        }
        for arm in (UNTREATED.name, PAPER.name)
    }
    rows = []
    for recipe, arm in dict.fromkeys((run.recipe, run.arm) for run in runs):
        group = [run for run in runs if (run.recipe, run.arm) == (recipe, arm)]
        excesses = [run.excess for run in group if run.excess is not None]
        alike = untreated[PAPER.name if arm.startswith(f"{PAPER.name}-") else UNTREATED.name][recipe]
        comparable = arm not in untreated and arm != CONTROL.name and bool(alike)
        comparable = comparable and {run.when for run in group} <= {"start", "never", "by the agent"}
        shares = [run.common_share for run in group if run.common_share is not None]
        rows.append(
            CureRow(
                recipe=recipe,
                arm=arm,
                when=", ".join(dict.fromkeys(run.when for run in group)),
                policy=", ".join(dict.fromkeys(run.policy for run in group)),
                runs=len(group),
                failed=_failed(group),
                chance=fisher(_failed(group), len(group), _failed(alike), len(alike)) if comparable else None,
                harmed=sum(run.harm_step is not None for run in group),
                dangerous=sum(_dangerous(run) for run in group),
                excess=median(excesses) if excesses else None,
                worst_excess=max(excesses, default=None),
                worst_offset=max(run.offset_end for run in group),
                worst_score=max(run.score_after for run in group),
                common_share=median(shares) if shares else None,
                key_bias=max((run.key_bias for run in group if run.key_bias is not None), default=None),
            )
        )
    return rows


def _dangerous(run: CuredRun) -> bool:
    return run.score_after >= DANGEROUS_SCORE


def _failed(runs: Sequence[CuredRun]) -> int:
    return sum(run.harm_step is not None or _dangerous(run) for run in runs)


def fisher(failed: int, runs: int, other_failed: int, other_runs: int) -> float:
    """The chance that `failed` or fewer of `runs` runs fail, if all failures of both groups are dealt blindly."""
    total = failed + other_failed
    ways = (math.comb(runs, count) * math.comb(other_runs, total - count) for count in range(min(failed, total) + 1))
    return sum(ways) / math.comb(runs + other_runs, total)
