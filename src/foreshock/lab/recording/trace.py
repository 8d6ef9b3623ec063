"""Recorded runs as lines of JSON.

A first line {"foreshock_trace": 1, ...what was run...}, then one line for each of
- the agent's events as they travel on the wire, each sample with what else the detectors read (`read`), so that a
  replay says what the agent said. In recordings up to commit 09575e2 a sample names its slots one by one (`slots`),
  rounded to four digits, and is the merger of several samples; the published ones are of this kind;
- `steps`: loss and gradient norm of every single step since `since_step`, which the baselines and the definition of
  harm need;
- `probe`: what recorders up to commit ba386e0 measured of weights. It is passed over.
What a trace did not record stays NaN (or None); it never becomes a zero.
"""

import gzip
import json
import lzma
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from foreshock.contract import wire
from foreshock.contract.slots import COUNT_SLOTS, Floats, Slot, Words, identity_row
from foreshock.monitor.detect.readings import Readings, head_readings

RECORDED: Final = ".jsonl.gz"
PUBLISHED: Final = ".trace.xz"
"""How the names of recordings end; the published ones are smaller."""
_XZ: Final = b"\xfd7zXZ\0"
"""What every xz file begins with."""
_EVENT: TypeAdapter[wire.Event] = TypeAdapter(wire.Event)
_UNRECORDED: Final = (Slot.SCORE_OFFSET_SUMSQ,)
"""What merged samples leave out: NaN when read back."""
READ: Final = ("suspect_step", "broken_step", "lost_steps", "weights_broken", "parameters", "rounds", "place")
"""The fields of `Readings` that no event holds. The last came later than the first recordings."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Loss and gradient norm (before clipping) of single steps, [M] each; NaN where not recorded."""

    step: npt.NDArray[np.int64]
    loss: Floats
    grad_norm: Floats
    span: npt.NDArray[np.int64]
    """steps behind a value: 1, or more where only samples were recorded"""


@dataclass(frozen=True, slots=True)
class Trace:
    """A run as it was recorded, in the order of its steps.

    The header's fields that `foreshock lab score` reads: recipe, arm, seed, split ("tuning" or "held-out"), truth
    ("healthy", "rounding", "score growth" or "other": what the run was made to show) and nature ("natural" or
    "injected").
    """

    path: Path
    header: dict[str, Any]
    started: wire.Started
    events: list[wire.Event] = field(repr=False)
    """samples, verdicts and switches after the start"""
    steps: Steps = field(repr=False)
    read: dict[int, dict[str, Any]] = field(repr=False, default_factory=dict)
    """the fields READ of samples, by step"""

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.name.removesuffix(RECORDED).removesuffix(PUBLISHED)

    @property
    def samples(self) -> list[wire.Sample]:
        """The samples alone."""
        return [event for event in self.events if isinstance(event, wire.Sample)]

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The (layer, head) of every row of a sample."""
        return wire.head_refs(self.started.layers)

    @property
    def rounds(self) -> bool:
        """Whether attention was computed in a type that rounds."""
        return self.started.numerics not in ("float32", "float64")


def _numbers(values: Any) -> Floats:
    """What the writer wrote as numbers and names."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float, str}:
        raise ValueError("expected a list of numbers")
    return np.array(values, dtype=np.float64)


def _from_slots(named: dict[str, Any], heads: int) -> Words:
    words = np.tile(identity_row(), (heads, 1))
    floats = words.view(np.float64)
    floats[:, list(_UNRECORDED)] = np.nan
    for name, given in named.items():
        slot = Slot.__members__.get(name.upper())
        if slot is None:  # a newer version's
            continue
        values = named.get(given) if isinstance(given, str) else given  # the same as another slot
        if values is None:  # ...which is its identity everywhere
            continue
        if len(values) != heads:
            raise ValueError(f"slot {name} speaks of {len(values)} heads in a trace of {heads}")
        if slot in COUNT_SLOTS:
            words[:, slot] = values
        else:
            floats[:, slot] = _numbers(values)
    return words


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a recording. Raises ValueError with a sentence for a file that is none, or not whole."""
    if not path.exists():
        raise ValueError(f"there is no trace at {path}; the recorded runs are part of the repository, in lab/traces")
    try:
        given = path.read_bytes()
        text = lzma.decompress(given) if given.startswith(_XZ) else gzip.decompress(given)
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(
            f"{path} is not a whole trace: {error}; give JSON lines compressed by gzip or xz, written to their end"
        ) from None
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise ValueError(f"{path} holds no lines; give a trace with at least one sample")
    return lines


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises ValueError with a sentence for an empty, truncated or foreign file."""
    lines = read_lines(path)
    if "foreshock_trace" not in lines[0]:
        raise ValueError(f"{path} is no trace: its first line has the fields {', '.join(sorted(lines[0])[:8])}")
    trace = _trace(path, lines)
    for what, steps in (
        ("samples", [sample.step for sample in trace.samples]),
        ("single steps", trace.steps.step.tolist()),
    ):
        if any(later <= earlier for earlier, later in pairwise(steps)):
            raise ValueError(f"{path} goes backwards in its {what}; give a trace of one run without restarts")
    if not trace.samples:
        raise ValueError(f"{path} holds no sample; give a trace with at least one")
    return trace


def _trace(path: Path, lines: list[dict[str, Any]]) -> Trace:
    if lines[0]["foreshock_trace"] != 1:
        raise ValueError(f"{path} has trace version {lines[0]['foreshock_trace']!r}; this program reads version 1")
    started: wire.Started | None = None
    events: list[wire.Event] = []
    read: dict[int, dict[str, Any]] = {}
    single: list[tuple[int, Floats, Floats]] = []
    for number, line in enumerate(lines[1:], start=2):
        kind = line.get("kind")
        try:
            if kind == "steps":
                single.append((int(line["since_step"]), _numbers(line["loss"]), _numbers(line["grad_norm"])))
                if len(single[-1][1]) != len(single[-1][2]):
                    raise ValueError("as many losses as gradient norms are needed")
            elif kind != "probe":
                heads = 0 if started is None else len(wire.head_refs(started.layers))
                event = _EVENT.validate_python(_unpacked(line, heads), strict=False)
                if isinstance(event, wire.Started):
                    started = started or event
                elif isinstance(event, wire.Sample | wire.Verdict | wire.Switched):
                    events.append(event)
                    if isinstance(event, wire.Sample) and "read" in line:
                        read[event.step] = {name: line["read"][name] for name in READ if name in line["read"]}
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{path}, line {number} holds an event that is none: {first['msg']}") from None
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path}, line {number}: {type(error).__name__} {error}") from None
    if started is None:
        raise ValueError(f"{path} does not say which heads it watched; it was not recorded from the start")
    samples = [event for event in events if isinstance(event, wire.Sample)]
    return Trace(path, lines[0], started, events, _single(single) if single else _of_samples(samples), read)


def _unpacked(line: dict[str, Any], heads: int) -> dict[str, Any]:
    """A sample line with its slots packed again as it travels on the wire."""
    if line.get("kind") != "sample":
        return line
    line = {"unix_seconds": 0.0, **line}
    if "slots" in line:
        line["states"] = wire.Array.of(_from_slots(line.pop("slots"), heads)).model_dump()
    if isinstance(line.get("modes"), list):
        line["modes"] = wire.Array.of(np.array(line["modes"], dtype=np.int32)).model_dump()
    if isinstance(line.get("query_norm"), list):
        line["query_norm"] = wire.Array.of(_numbers(line["query_norm"]).astype(np.float32)).model_dump()
    return line


def _single(parts: list[tuple[int, Floats, Floats]]) -> Steps:
    step = np.concatenate([since + 1 + np.arange(len(loss)) for since, loss, _ in parts]).astype(np.int64)
    loss, grad_norm = (np.concatenate([part[which] for part in parts]) for which in (1, 2))
    return Steps(step, loss, grad_norm, np.ones_like(step))


def _of_samples(samples: list[wire.Sample]) -> Steps:
    """Where single steps were not recorded: mean loss and gradient norm as the samples hold them."""

    def known(values: list[float | None]) -> Floats:
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

    return Steps(
        np.array([s.step for s in samples], dtype=np.int64),
        known([s.loss for s in samples]),
        known([s.grad_norm for s in samples]),
        np.array([max(s.step - s.since_step, 1) for s in samples], dtype=np.int64),
    )


def readings(trace: Trace) -> Iterator[Readings]:
    """The samples that hold counts as the detectors read them; modes that were not recorded are taken for plain.

    Raises ValueError where they are of other heads.
    """
    heads = len(trace.heads)
    for sample in trace.samples:
        words = sample.words()
        if words is None:
            continue
        if len(words) != heads:
            raise ValueError(f"{trace.path}, step {sample.step}: {len(words)} heads in a trace of {heads}")
        yield Readings(
            step=sample.step,
            since_step=sample.since_step,
            **head_readings(words),
            modes=np.zeros(heads, dtype=np.int32) if sample.modes is None else sample.modes.numpy(),
            loss=sample.loss,
            grad_norm=sample.grad_norm,
            learning_rate=sample.learning_rate,
            **({"rounds": trace.rounds} | trace.read.get(sample.step, {})),
        )
