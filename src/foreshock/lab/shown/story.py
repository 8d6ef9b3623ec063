"""The sentences about the recorded runs while they are played: each number is taken from the runs themselves.

Warnings are today's detectors' (lab/recording/replay.py); the switch is the one that happened when the run was made.
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
"""The first two are twins; the third is on PyTorch's own kernel."""
_STEPS_OF_A_LOSS: Final = 500
"""A single step's loss is mostly the luck of its batch."""


@dataclass(slots=True)
class Record:
    """Fill it with an agent's events, in order: step, largest |score| of any head and loss of each sample."""

    steps: list[int] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    warnings: list[wire.Verdict] = field(default_factory=list)
    """verdicts raised"""
    switches: list[wire.Switched] = field(default_factory=list)

    def add(self, event: wire.Event) -> None:
        """Take what matters of one event."""
        if isinstance(event, wire.Verdict) and event.state == "raised":
            self.warnings.append(event)
        elif isinstance(event, wire.Switched) and event.outcome == "applied":
            self.switches.append(event)
        elif isinstance(event, wire.Sample) and (words := event.words()) is not None:
            self.steps.append(event.step)
            self.largest.append(float(slot_values(words, Slot.ROW_MAX_ABS).max()))
            self.losses.append(np.nan if event.loss is None else event.loss)


def recordings() -> dict[str, Trace]:
    """The runs by name, in the order in which they are shown."""
    return {name: read_trace(Path(__file__).parent / f"{name}.jsonl.gz") for name in NAMES}


def equal_until(one: Trace, other: Trace) -> int:
    """The last step up to which every recorded loss and largest score of two runs is the same; 0 for none."""
    last = 0
    for mine, its in zip(one.samples, other.samples, strict=False):
        if (mine.step, mine.loss, mine.states) != (its.step, its.loss, its.states):
            break
        last = mine.step
    return last


def opening(traces: dict[str, Trace]) -> Iterator[tuple[str, str]]:
    """What one is about to see: a sentence or two about each run, and under "" about all."""
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
    """What happened so far. Fill it with the events of all runs, in the order in which they are played."""

    records: dict[str, Record] = field(default_factory=lambda: {name: Record() for name in NAMES})
    dangerous: dict[str, int] = field(default_factory=dict)
    """The first step at which a run's largest score was `DANGEROUS_SCORE`."""
    _sentence: str = ""
    """Of the last warning, which twins share."""

    def hear(self, run: str, event: wire.Event) -> Iterator[tuple[str, str]]:
        """What there is to say after an event, and of which run."""
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
        """How far the loss of the 500 steps up to `step` is above the twin's, as a share of it: over the same steps for
        both twins, whose samples are of different steps."""
        alone, switched = (self._mean_loss(self.records[name], step) for name in (LEFT_ALONE, SWITCHED))
        return alone / switched - 1

    @staticmethod
    def _mean_loss(record: Record, step: int) -> float:
        steps = [0, *record.steps]
        sums = np.concatenate(([0.0], np.cumsum(np.diff(steps) * record.losses)))
        start, end = np.interp((step - _STEPS_OF_A_LOSS, step), steps, sums)
        return float((end - start) / _STEPS_OF_A_LOSS)

    def ending(self) -> Iterator[str]:
        """What was seen, in sentences."""
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
