"""Recorded runs as gzipped JSON lines: our own (every head, every sample) and those that came before the project.

Our own format: a first line {"foreshock_trace": 1, ...what was run...}, then the agent's events as they travel on the
wire. What a trace did not record stays NaN (or None); it never becomes a zero.
"""

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from foreshock.contract import wire
from foreshock.contract.slots import SLOT_COUNT, Slot
from foreshock.monitor.detectors import Readings

_EVENT: TypeAdapter[wire.Event] = TypeAdapter(wire.Event)
_ROWS_OF_A_BATCH = 32 * 256
"""Rows behind a share in the foreign format: one batch of 32 sequences of 256 tokens (the recipe key-bias)."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A run as it was recorded, in the order of its steps."""

    path: Path
    header: dict[str, Any]
    started: wire.Started
    events: list[wire.Event] = field(repr=False)
    """samples, verdicts and switches after the start"""

    @property
    def samples(self) -> list[wire.Sample]:
        """The samples alone."""
        return [event for event in self.events if isinstance(event, wire.Sample)]

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The (layer, head) of every row of a sample."""
        return wire.head_refs(self.started.layers)


class TraceWriter:
    """A sink for an agent's events that writes our own format; use it in a with block."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = gzip.GzipFile(path, "wb", compresslevel=9, mtime=0)
        self._write({"foreshock_trace": 1, **header})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def __call__(self, event: wire.Event) -> None:
        """Write one event."""
        self._write(event.model_dump(mode="json", exclude_defaults=True) | {"kind": event.kind})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._file.close()


def read_trace(path: Path) -> Trace:
    """Read a trace of either format. Raises ValueError with a sentence for an empty, truncated or foreign file."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file if line.strip()]
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not a whole trace: {error}; give gzipped JSON lines, recorded to their end"
        ) from None
    if not lines or not isinstance(lines[0], dict):
        raise ValueError(f"{path} holds no lines; give a trace with at least one sample")
    if "foreshock_trace" in lines[0]:
        trace = _own(path, lines)
    elif {"it", "cc", "lg"} <= lines[0].keys():
        trace = _foreign(path, lines)
    else:
        raise ValueError(f"{path} is no trace: its first line has the fields {', '.join(sorted(lines[0])[:8])}")
    steps = [sample.step for sample in trace.samples]
    if not steps:
        raise ValueError(f"{path} holds no sample; give a trace with at least one")
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError(f"{path} goes backwards in its steps; give a trace of one run without restarts")
    return trace


def _own(path: Path, lines: list[Any]) -> Trace:
    if lines[0]["foreshock_trace"] != 1:
        raise ValueError(f"{path} has trace version {lines[0]['foreshock_trace']!r}; this program reads version 1")
    try:
        events = [_EVENT.validate_python(line, strict=False) for line in lines[1:]]
    except ValidationError as error:
        raise ValueError(f"{path} holds an event that is none: {error.errors()[0]['msg']}") from None
    started = next((event for event in events if isinstance(event, wire.Started)), None)
    if started is None:
        raise ValueError(f"{path} does not say which heads it watched; it was not recorded from the start")
    kept: list[wire.Event] = [
        event for event in events if isinstance(event, wire.Sample | wire.Verdict | wire.Switched)
    ]
    return Trace(path, lines[0], started, kept)


def _foreign(path: Path, lines: list[Any]) -> Trace:
    """Offset and largest score were recorded for each layer: every head of the layer is given the layer's value."""
    layers, heads = np.shape(lines[0]["sn"])
    started = wire.Started(
        step=0,
        unix_seconds=0.0,
        layers=tuple(
            wire.Layer(
                layer=layer,
                name=f"layer-{layer}",
                heads=tuple(range(heads)),
                kv_heads=heads,
                head_dim=64,
                served_by="recorded",
                sampled=True,
            )
            for layer in range(layers)
        ),
        policy="observe",
        numerics="recorded",
        labels={
            "recorded-per-layer": "score offset (mean score), largest score",
            "not-recorded": "modes, W_K, |row maximum|, spread of offset and delta bias",
            "tied-one": "fp32 scores within 1e-3 of the maximum",
        },
    )
    events: list[wire.Event] = []
    since = 0
    for number, line in enumerate(lines):
        try:
            events.append(_foreign_sample(line, since, heads))
            since = events[-1].step
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number + 1}: {type(error).__name__} {error}") from None
    return Trace(path, {"recipe": path.name.removesuffix(".jsonl.gz")}, started, events)


def _foreign_sample(line: dict[str, Any], since: int, heads: int) -> wire.Sample:
    def flat(name: str) -> "np.ndarray[Any, np.dtype[np.float64]]":
        return np.array(line[name], dtype=np.float64).reshape(-1)

    def spread(name: str) -> "np.ndarray[Any, np.dtype[np.float64]]":
        return np.repeat(flat(name), heads)

    words = np.zeros((flat("sn").size, SLOT_COUNT), dtype=np.int64)
    floats = words.view(np.float64)
    words[:, Slot.ROWS] = _ROWS_OF_A_BATCH
    words[:, Slot.ROWS_TIED_BF16] = np.rint(flat("p1") * _ROWS_OF_A_BATCH)
    words[:, Slot.ROWS_TIED_ONE] = np.rint(flat("mm") * _ROWS_OF_A_BATCH)
    floats[:, Slot.SCORE_MAX] = spread("lg")
    floats[:, Slot.OFFSET_SUM] = spread("cc") * _ROWS_OF_A_BATCH
    floats[:, Slot.DELTA_BIAS_SUM] = flat("db")
    floats[:, Slot.DELTA_BIAS_ABS] = flat("dn")
    floats[:, [Slot.ROW_MAX_ABS, Slot.OFFSET_SUMSQ, Slot.DELTA_BIAS_SUMSQ]] = np.nan
    return wire.Sample(
        step=int(line["it"]),
        since_step=since,
        unix_seconds=0.0,
        states=wire.Array.of(words),
        query_norm=wire.Array.of(flat("sn").astype(np.float32)),
        loss=float(line["loss"]),
        loss_max=float(line["mx"]),
        grad_norm=float(line["gn"]),
    )


def readings(trace: Trace) -> Iterator[Readings]:
    """The samples as the detectors read them. Modes that were not recorded are taken for plain."""
    heads = len(trace.heads)
    for sample in trace.samples:
        words = sample.words()
        if words is None:
            continue
        if words.shape[0] != heads:
            raise ValueError(f"{trace.path}, step {sample.step}: {words.shape[0]} heads in a trace of {heads}")
        norms = {
            name: array.numpy().astype(np.float64)
            for name in ("query_norm", "key_norm", "query_key_norm")
            if (array := getattr(sample, name)) is not None
        }
        yield Readings.from_words(
            step=sample.step,
            since_step=sample.since_step,
            words=words,
            modes=np.zeros(heads, dtype=np.int32) if sample.modes is None else sample.modes.numpy(),
            loss=sample.loss if sample.loss is None or math.isfinite(sample.loss) else math.nan,
            grad_norm=sample.grad_norm,
            **norms,
        )
