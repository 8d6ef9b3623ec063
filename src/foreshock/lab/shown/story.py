"""Commentary of the recorded runs during a replay; every number is computed from the runs.

Warnings come from the current detectors (lab/recording/replay.py); the switch is the recorded one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.lab.recording.trace import Trace, read_trace
from foreshock.monitor.detect.forecast import DANGEROUS_SCORE

LEFT_ALONE, SWITCHED, OF_PYTORCH = NAMES = ("left-alone", "switched", "pytorch-flash")
"""The first two are equal runs until the second is switched; the third uses PyTorch's native kernel."""
_STEPS_OF_A_LOSS: Final = 500
"""Steps over which the loss is averaged, because the loss of a single step depends mostly on its batch."""


@dataclass(slots=True)
class Record:
    """Step, largest |score| of any head and loss of each sample of a run; pass all events to `add` in order."""

    steps: list[int] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    warnings: list[wire.Verdict] = field(default_factory=list)
    """verdicts raised"""
    switches: list[wire.Switched] = field(default_factory=list)

    def add(self, event: wire.Event) -> None:
        """Record the relevant values of one event."""
        if isinstance(event, wire.Verdict) and event.state == "raised":
            self.warnings.append(event)
        elif isinstance(event, wire.Switched) and event.outcome == "applied":
            self.switches.append(event)
        elif isinstance(event, wire.Sample) and (words := event.words()) is not None:
            self.steps.append(event.step)
            self.largest.append(float(slot_values(words, Slot.ROW_MAX_ABS).max()))
            self.losses.append(np.nan if event.loss is None else event.loss)


def recordings() -> dict[str, Trace]:
    """Read the runs, by name, in the order in which they are shown."""
    return {name: read_trace(Path(__file__).parent / f"{name}.jsonl.gz") for name in NAMES}


def equal_until(one: Trace, other: Trace) -> int:
    """Return the last step up to which all samples of two runs have the same losses and statistics; 0 if none have."""
    last = 0
    for mine, its in zip(one.samples, other.samples, strict=False):
        if (mine.step, mine.loss, mine.states) != (its.step, its.loss, its.states):
            break
        last = mine.step
    return last


def opening(traces: dict[str, Trace]) -> Iterator[tuple[str, str]]:
    """Yield the introduction: (run, text) for each run, and ("", text) for all runs."""
    alone, twin, vendor = (traces[name] for name in NAMES)
    model = alone.header["shows"]
    yield (
        "",
        f"Three recorded trainings in BF16, on an {model['device']}: GPTs of {model['layers']} layers and "
        f"{model['heads']} heads, {'rotary' if model['rotary'] else 'learned'} positions, "
        f"{'a' if model['key_bias'] else 'no'} bias on the keys, a {model['schedule']} learning rate of "
        f"{model['learning_rate']:g}. They read real text: documentation and source of Python packages. No fault "
        "was injected.",
    )
    ours, own = "foreshock's Triton kernels, where every row is counted", vendor.header["backend"]
    theirs = f"PyTorch's own {own} kernel, of which a sample of rows is measured"
    yield LEFT_ALONE, f"{ours}; {_batches(alone)}; not switched."
    yield (
        SWITCHED,
        f"the same run, with the same numbers up to step {equal_until(alone, twin):,}; its agent may switch heads.",
    )
    yield OF_PYTORCH, f"{theirs}; {_batches(vendor)}; not switched, and without a switched twin."
    yield (
        "",
        "The detectors of this version make the warnings now. The switch was recorded. "
        f"Watch the largest score: at {DANGEROUS_SCORE:.0f} rounding to BF16 moves a score by about 1. Orders "
        "from the page have no effect, because this is a recording.",
    )


def _batches(trace: Trace) -> str:
    return f"batches of {trace.header['shows']['batch']}, seed {trace.header['seed']}"


@dataclass(slots=True)
class Story:
    """Commentary of all runs; pass their events to `hear` in the order of the replay."""

    records: dict[str, Record] = field(default_factory=lambda: {name: Record() for name in NAMES})
    dangerous: dict[str, int] = field(default_factory=dict)
    """The first step at which a run's largest score was `DANGEROUS_SCORE`."""
    _sentence: str = ""
    """The last verdict's sentence, which is the same for both twins."""

    def hear(self, run: str, event: wire.Event) -> Iterator[tuple[str, str]]:
        """Add an event and yield the comments on it, as (run, text)."""
        record = self.records[run]
        record.add(event)
        if isinstance(event, wire.Verdict) and event.state != "updated":
            known, self._sentence = self._sentence == event.sentence, event.sentence
            word = event.severity if event.state == "raised" else event.state
            yield run, f"{word}: {'the same as of its twin.' if known else event.sentence}"
        elif isinstance(event, wire.Switched) and event.outcome == "applied":
            yield run, f"its agent switches {len(event.heads)} heads from {event.before[0]} to {event.after[0]}."
        elif run not in self.dangerous and record.largest and record.largest[-1] >= DANGEROUS_SCORE:
            self.dangerous[run] = event.step
            yield run, f"its largest score reaches {DANGEROUS_SCORE:.0f}."

    def excess(self, step: int) -> float:
        """Return by which fraction the loss of the unswitched twin is above that of the switched one.

        Both are means over the 500 steps up to `step`, interpolated because the twins have samples at different steps.
        """
        alone, switched = (self._mean_loss(self.records[name], step) for name in (LEFT_ALONE, SWITCHED))
        return alone / switched - 1

    @staticmethod
    def _mean_loss(record: Record, step: int) -> float:
        steps = [0, *record.steps]
        sums = np.concatenate(([0.0], np.cumsum(np.diff(steps) * record.losses)))
        start, end = np.interp((step - _STEPS_OF_A_LOSS, step), steps, sums)
        return float((end - start) / _STEPS_OF_A_LOSS)

    def ending(self) -> Iterator[str]:
        """Yield the summary, one sentence or two per run."""
        for run in (LEFT_ALONE, OF_PYTORCH):
            yield f"{run} {self._failure(run)}"
        if not self.records[SWITCHED].switches:
            return
        switched, end = self.records[SWITCHED], min(self.records[name].steps[-1] for name in (LEFT_ALONE, SWITCHED))
        switch = switched.switches[0]
        since = max(score for step, score in zip(switched.steps, switched.largest, strict=True) if step > switch.step)
        yield (
            f"{SWITCHED}: {len(switch.heads)} heads went to {switch.after[0]} at step {switch.step:,}; since then no "
            f"score was larger than {since:,.0f}. Left alone, the loss of the {_STEPS_OF_A_LOSS} steps up to {end:,} "
            f"was {self.excess(end):.1%} above it."
        )

    def _failure(self, run: str) -> str:
        warnings, dangerous = self.records[run].warnings, self.dangerous.get(run)
        if not warnings:
            return "was not warned about."
        first = warnings[0]
        words = f"was warned about at step {first.step:,}: layer {first.layer} head {first.head}, cause {first.cause}."
        if dangerous is None:
            return words
        later = dangerous - first.step
        return (
            f"{words} {later:,} steps later its largest score reached {DANGEROUS_SCORE:.0f}; at the end it is "
            f"{self.records[run].largest[-1]:,.0f}."
        )
