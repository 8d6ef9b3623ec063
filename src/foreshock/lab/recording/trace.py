"""Recorded runs as lines of JSON.

The first line is the header, {"foreshock_trace": 1, ...} with a description of the run. Each other line is one of
- an event of the agent in the wire format. A sample also has the other values that the detectors read (`read`), so that
  a replay gives the same verdicts as the agent. In recordings up to commit 09575e2, which include the published ones, a
  sample line merges several samples and has its slots by name (`slots`), rounded to four digits;
- `steps`: loss and gradient norm of every step after `since_step`, for the baselines and the definition of harm;
- `probe`: measurements of weights by recorders up to commit ba386e0, which are ignored.
Values that a trace did not record are NaN or None, never zero.
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
"""File extensions of recordings; published ones are compressed by xz, which makes them smaller."""
_XZ: Final = b"\xfd7zXZ\0"
"""The first bytes of every xz file."""
_EVENT: TypeAdapter[wire.Event] = TypeAdapter(wire.Event)
_UNRECORDED: Final = (Slot.SCORE_OFFSET_SUMSQ,)
"""Slots that merged samples do not record; they are NaN when read."""
READ: Final = ("suspect_step", "broken_step", "lost_steps", "weights_broken", "parameters", "rounds", "place")
"""The fields of `Readings` that are not part of an event. Early recordings lack the last one."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Loss and gradient norm (before clipping) of single steps, [M] each; NaN where not recorded."""

    step: npt.NDArray[np.int64]
    loss: Floats
    grad_norm: Floats
    span: npt.NDArray[np.int64]
    """steps that a value averages over: 1, or more if only samples were recorded"""


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded run, in the order of its steps.

    `foreshock lab score` reads these fields of the header: recipe, arm (the variant), seed, split ("tuning" or
    "held-out"), truth ("healthy", "rounding", "score growth" or "other": the outcome that the run was designed to
    show) and nature ("natural" or "injected").
    """

    path: Path
    header: dict[str, Any]
    started: wire.Started
    events: list[wire.Event] = field(repr=False)
    """samples, verdicts and switches after the start"""
    steps: Steps = field(repr=False)
    read: dict[int, dict[str, Any]] = field(repr=False, default_factory=dict)
    """the fields of READ that samples recorded, by step"""

    @property
    def name(self) -> str:
        """The file name without its extension."""
        return self.path.name.removesuffix(RECORDED).removesuffix(PUBLISHED)

    @property
    def samples(self) -> list[wire.Sample]:
        """Only the samples."""
        return [event for event in self.events if isinstance(event, wire.Sample)]

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The (layer, head) of every row of a sample."""
        return wire.head_refs(self.started.layers)

    @property
    def rounds(self) -> bool:
        """Whether attention was computed in a 16-bit type."""
        return self.started.numerics not in ("float32", "float64")


def _numbers(values: Any) -> Floats:
    """Parse a list of numbers, in which NaN and infinities are written as names."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float, str}:
        raise ValueError("expected a list of numbers")
    return np.array(values, dtype=np.float64)


def _from_slots(named: dict[str, Any], heads: int) -> Words:
    words = np.tile(identity_row(), (heads, 1))
    floats = words.view(np.float64)
    floats[:, list(_UNRECORDED)] = np.nan
    for name, given in named.items():
        slot = Slot.__members__.get(name.upper())
        if slot is None:  # written by a newer version
            continue
        values = named.get(given) if isinstance(given, str) else given  # a string names a slot with the same values
        if values is None:  # the other slot has its identity in every head
            continue
        if len(values) != heads:
            raise ValueError(f"slot {name} has values for {len(values)} heads in a trace of {heads}")
        if slot in COUNT_SLOTS:
            words[:, slot] = values
        else:
            floats[:, slot] = _numbers(values)
    return words


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a recording. Raises ValueError for a file that is not a recording or is incomplete."""
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
    """Read a trace. Raises ValueError for a file that is empty, truncated or not a trace."""
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
            raise ValueError(f"{path}, line {number} is not a valid event: {first['msg']}") from None
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path}, line {number}: {type(error).__name__} {error}") from None
    if started is None:
        raise ValueError(f"{path} does not say which heads it watched; it was not recorded from the start")
    samples = [event for event in events if isinstance(event, wire.Sample)]
    return Trace(path, lines[0], started, events, _single(single) if single else _of_samples(samples), read)


def _unpacked(line: dict[str, Any], heads: int) -> dict[str, Any]:
    """Return a sample line with its arrays packed as in the wire format; other lines are returned unchanged."""
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
    """Return the mean loss and gradient norm of each sample, for a trace that did not record single steps."""

    def known(values: list[float | None]) -> Floats:
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

    return Steps(
        np.array([s.step for s in samples], dtype=np.int64),
        known([s.loss for s in samples]),
        known([s.grad_norm for s in samples]),
        np.array([max(s.step - s.since_step, 1) for s in samples], dtype=np.int64),
    )


def readings(trace: Trace) -> Iterator[Readings]:
    """Yield the samples with measurements as the detectors read them; modes that were not recorded count as plain.

    Raises ValueError for a sample with another number of heads than the trace.
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
