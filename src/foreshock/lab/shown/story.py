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
_TEXTS: Final = {"byte pairs": "documentation and source of Python packages"}
WORTH_SAYING: Final = (0.01, 0.02, 0.04)
"""Shares of the twin's loss: a sentence says when the loss first lies that far above it."""
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


def kernel_of(trace: Trace) -> str:
    """Whose attention a run trained with, in words."""
    if backend := trace.header.get("backend"):
        return f"PyTorch's own {backend} kernel, kept as it is and watched by a sample of its rows"
    (served_by,) = {layer.served_by for layer in trace.started.layers}
    return {"kernel": "foreshock's Triton kernels, where every row is counted"}[served_by]


def opening(traces: dict[str, Trace]) -> Iterator[tuple[str, str]]:
    """What one is about to see: a sentence or two about each run, and under "" about all."""
    alone, twin, vendor = (traces[name] for name in NAMES)
    model = alone.header["shows"]
    yield (
        "",
        f"Three recorded trainings in BF16, on an {model['device']}: GPTs of {model['layers']} layers and "
        f"{model['heads']} heads, {'rotary' if model['rotary'] else 'learned'} positions, "
        f"{'a' if model['key_bias'] else 'no'} bias on the keys, a {model['schedule']} learning rate of "
        f"{model['learning_rate']:g}. They read real text: {_TEXTS[model['text']]}. Nothing was injected.",
    )
    yield LEFT_ALONE, f"{kernel_of(alone)}; {_batches(alone)}; nobody acts."
    yield (
        SWITCHED,
        f"the same run, equal in every recorded number up to step {equal_until(alone, twin):,}; its agent may act.",
    )
    yield OF_PYTORCH, f"{kernel_of(vendor)}; {_batches(vendor)}; nobody acts. It has no switched twin."
    yield (
        "",
        "Warnings are made now, by the detectors of this version. The switch is the one that happened then. "
        f"Watch the largest score: at {DANGEROUS_SCORE:.0f} rounding to BF16 moves a score by about 1. An order given "
        "on the page reaches nobody, since nothing trains.",
    )


def _batches(trace: Trace) -> str:
    return f"batches of {trace.header['shows']['batch']}, seed {trace.header['seed']}"


@dataclass(slots=True)
class Story:
    """What happened so far. Fill it with the events of all runs, in the order in which they are played."""

    records: dict[str, Record] = field(default_factory=lambda: {name: Record() for name in NAMES})
    dangerous: dict[str, int] = field(default_factory=dict)
    """The first step at which a run's largest score was `DANGEROUS_SCORE`."""
    _shares_passed: int = 0
    """How many of `WORTH_SAYING` the loss has passed."""
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
        elif isinstance(event, wire.Sample) and record.largest:
            if run not in self.dangerous and record.largest[-1] >= DANGEROUS_SCORE:
                self.dangerous[run] = event.step
                yield run, f"its largest score reaches {DANGEROUS_SCORE:.0f}."
            if run in (LEFT_ALONE, SWITCHED) and (excess := self._excess_to_say()) is not None:
                span = f"the {_STEPS_OF_A_LOSS} steps up to {self.shared_step:,}"
                yield LEFT_ALONE, f"its loss over {span} lies {excess:.1%} above its switched twin's."

    @property
    def shared_step(self) -> int:
        """The last step that both twins have reached."""
        return min((self.records[name].steps or [0])[-1] for name in (LEFT_ALONE, SWITCHED))

    def excess(self, step: int) -> float:
        """How far the loss of the 500 steps up to `step` lies above the twin's, as a share of it; NaN before."""
        alone, switched = (self._mean_loss(name, step) for name in (LEFT_ALONE, SWITCHED))
        return alone / switched - 1

    def _mean_loss(self, run: str, step: int) -> float:
        """Over the same steps for both twins, whose samples are of different steps."""
        record = self.records[run]
        if step < _STEPS_OF_A_LOSS:
            return float("nan")
        steps = [0, *record.steps]
        sums = np.concatenate(([0.0], np.cumsum(np.diff(steps) * record.losses)))
        start, end = np.interp((step - _STEPS_OF_A_LOSS, step), steps, sums)
        return float((end - start) / _STEPS_OF_A_LOSS)

    def _excess_to_say(self) -> float | None:
        excess = self.excess(self.shared_step)
        reached = sum(excess >= each for each in WORTH_SAYING)
        if reached <= self._shares_passed:
            return None
        self._shares_passed = reached
        return excess

    def ending(self) -> Iterator[str]:
        """What was seen, in sentences."""
        for run in (LEFT_ALONE, OF_PYTORCH):
            yield f"{run} {self._failure(run)}"
        if not self.records[SWITCHED].switches:
            return
        switched, end = self.records[SWITCHED], self.shared_step
        switch = switched.switches[0]
        since = max(score for step, score in zip(switched.steps, switched.largest, strict=True) if step > switch.step)
        steps = [step for step in self.records[LEFT_ALONE].steps if switch.step < step <= end]
        worst = max(steps, key=self.excess)
        yield (
            f"{SWITCHED}: {len(switch.heads)} heads went to {switch.after[0]} at step {switch.step:,}; since then no "
            f"score was larger than {since:,.0f}. Left alone, the loss lay "
            f"{self.excess(worst):.1%} above it at worst (step {worst:,}), and {self.excess(end):.1%} at the end."
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
