"""How far two runs that ought to be equal part: the limit beyond which a loss is harm, by recipe.

A fixed limit lies within the noise of some recipes and far above that of others. Where the float32 control of a recipe
was made at least twice with the same batches (two recordings, or the arm `control-again`), the limits of that recipe
are the least at which no control is harmed beside another, half as much again, and never below half a percent of loss
and a factor of 1.2 in gradient norm. Elsewhere they are those of `foreshock.lab.recording.harm`.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from typing import Any, Final

from foreshock.lab.recording.harm import Limits, first_harm
from foreshock.lab.recording.trace import Steps, Trace
from foreshock.lab.training.arm import CONTROL, CONTROL_AGAIN

_LEAST: Final = Limits(0.005, 1.2)
_MARGIN: Final = 1.5
_NEVER: Final = 1e9
_LARGEST: Final = 64.0
"""Excess beyond which no noise is looked for."""


def controls_of(traces: Iterable[Trace]) -> dict[tuple[Any, Any], list[Trace]]:
    """The controls of every recipe and seed."""
    found: dict[tuple[Any, Any], list[Trace]] = {}
    for trace in traces:
        if trace.header.get("arm") in (CONTROL.name, CONTROL_AGAIN.name):
            found.setdefault((trace.header.get("recipe"), trace.header.get("seed")), []).append(trace)
    return found


def limits_of_recipes(controls: Mapping[tuple[Any, Any], Sequence[Trace]]) -> dict[str, Limits]:
    """The limits of every recipe that has repeated controls."""
    pairs: dict[str, list[tuple[Steps, Steps]]] = {}
    for (recipe, _), made in controls.items():
        both = [(one.steps, other.steps) for one, other in permutations(made, 2)]
        pairs.setdefault(str(recipe), []).extend(both)
    return {recipe: calibrated_limits(known) for recipe, known in pairs.items() if known}


def calibrated_limits(pairs: Sequence[tuple[Steps, Steps]]) -> Limits:
    """From pairs of equal runs, each in both orders."""
    loss = max(_least(pair, lambda excess: Limits(excess, _NEVER)) for pair in pairs)
    norm = max(_least(pair, lambda excess: Limits(_NEVER, 1 + excess)) for pair in pairs)
    return Limits(
        max(_MARGIN * loss, _LEAST.loss_excess), max(1 + _MARGIN * norm, _LEAST.grad_norm_factor)
    )  # fmt: skip


def _least(pair: tuple[Steps, Steps], limits: Any) -> float:
    """The least excess at which the first of two runs is not harmed beside the second, by halving."""
    low, high = 0.0, _LARGEST
    both = min(int(steps.step[-1]) for steps in pair)
    one, other = (steps.only(steps.step <= both) for steps in pair)
    for _ in range(20):
        middle = (low + high) / 2
        harm = first_harm(one, other, limits(middle))
        low, high = (middle, high) if harm is not None and harm.by != "non-finite" else (low, middle)
    return high
