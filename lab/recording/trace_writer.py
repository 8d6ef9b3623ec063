"""Writes a run as it happens, in the format of foreshock.lab.recording.trace."""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from foreshock.contract import wire
from foreshock.contract.slots import SLOTS, Floats, Words, merge_words, slot_values
from foreshock.lab.recording.trace import UNREAD
from foreshock.monitor.detect.growth import BLOCKS_PER_PAST

_EVERY_STEPS: Final = 100
_DIGITS: Final = 4
"""Significant digits of a number in a trace: four take about two bytes after compression."""
_DIGITS_OF_A_STEP: Final = 3
"""Of a single step's loss; its gradient norm has one fewer. What is read of them are means and z-scores."""


class TraceWriter:
    """A sink for an agent's events that writes a trace; use it in a with block.

    Samples are merged until they are a fortieth of the run's life long, at most _EVERY_STEPS, as the detectors' own
    blocks, and numbers are rounded to four digits or fewer: a trace is small enough to commit. Give `steps` the loss
    and gradient norm of every step.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = gzip.GzipFile(path, "wb", compresslevel=9, mtime=0)
        self._waiting: list[wire.Sample] = []
        self._write({"foreshock_trace": 1, **header})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def __call__(self, event: wire.Event) -> None:
        """Write one event; samples that follow one another in equal modes wait until they are long enough."""
        if isinstance(event, wire.Sample):
            last = self._waiting[-1] if self._waiting else event
            if last is not event and (last.modes != event.modes or last.step != event.since_step):
                self._flush()
            self._waiting.append(event)
            if event.step - self._waiting[0].since_step >= min(_EVERY_STEPS, event.step / BLOCKS_PER_PAST):
                self._flush()
        elif not isinstance(event, wire.AgentHealth) and getattr(event, "state", "") != "updated":
            self._flush()
            self._write(event.model_dump(mode="json", exclude_defaults=True) | {"kind": event.kind})

    def steps(self, since_step: int, loss: Sequence[float] | Floats, grad_norm: Sequence[float] | Floats) -> None:
        """The loss and the gradient norm before clipping of steps since_step + 1, since_step + 2, ..."""
        numbers = {"loss": _rounded(loss, _DIGITS_OF_A_STEP), "grad_norm": _rounded(grad_norm, _DIGITS_OF_A_STEP - 1)}
        self._write({"kind": "steps", "since_step": since_step, **numbers})

    def _flush(self) -> None:
        if not self._waiting:
            return
        sample, words = _merged(self._waiting), [w for s in self._waiting if (w := s.words()) is not None]
        self._waiting = []
        line = sample.model_dump(mode="json", exclude_defaults=True, exclude={"states", "modes", "query_norm"})
        left_out = {"key_norm", "query_key_norm", "risk", "clip_factor", "clipped_steps"}
        for name in left_out | {"unix_seconds", "step_seconds", "agent_seconds"}:
            line.pop(name, None)
        line |= {name: _rounded([line[name]])[0] for name in ("loss", "loss_max", "grad_norm") if name in line}
        if words:
            line["slots"] = _by_slot(merge_words(words))
        if sample.modes is not None:
            line["modes"] = sample.modes.numpy().tolist()
        if sample.query_norm is not None:
            line["query_norm"] = _rounded(sample.query_norm.numpy())
        self._write(line | {"kind": "sample"})

    def copy(self, lines: Iterable[dict[str, Any]]) -> None:
        """Write lines of an earlier trace of the same run, as `lines_until` gives them, before anything else."""
        for line in lines:
            self._write(line)

    def flush(self) -> None:
        """Write what waits, so that it outlives this process."""
        self._flush()
        self._file.flush()

    def close(self) -> None:
        """Write what waits, and end the file."""
        self._flush()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


def lines_until(path: Path, step: int) -> Iterator[dict[str, Any]]:
    """The lines of a trace up to a step, without its header and its end; of a torn one those that are whole."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            next(file, None)
            for line in map(json.loads, file):
                if line["kind"] == "steps" and (count := step - line["since_step"]) > 0:
                    yield line | {name: line[name][:count] for name in ("loss", "grad_norm")}
                elif line["kind"] not in ("steps", "finished") and line["step"] <= step:
                    yield line
    except (EOFError, json.JSONDecodeError):
        return


def _merged(samples: list[wire.Sample]) -> wire.Sample:
    """One sample in place of several that follow one another: all but the states, which `merge_words` merges."""
    last = samples[-1]
    norm = next((s.query_norm for s in reversed(samples) if s.query_norm is not None), None)
    losses = [(s.loss, max(s.step - s.since_step, 1)) for s in samples if s.loss is not None]
    return last.model_copy(
        update={
            "since_step": samples[0].since_step,
            "query_norm": norm,
            "loss": sum(loss * n for loss, n in losses) / sum(n for _, n in losses) if losses else None,
            "loss_max": max((s.loss_max for s in samples if s.loss_max is not None), default=None),
            "loss_nonfinite_steps": sum(s.loss_nonfinite_steps for s in samples),
            "grad_norm": max((s.grad_norm for s in samples if s.grad_norm is not None), default=None),
            "grad_norm_nonfinite_steps": sum(s.grad_norm_nonfinite_steps for s in samples),
        }
    )


def _rounded(values: Sequence[float] | npt.NDArray[Any], digits: int = _DIGITS) -> list[float | str]:
    """Numbers for JSON, with `digits` significant digits; a non-finite one by its name, as on the wire."""
    names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    texts = (f"{value:.{digits}g}" for value in np.asarray(values, dtype=np.float64).reshape(-1).tolist())
    return [names[text] if text in names else float(text) for text in texts]


def _by_slot(words: Words) -> dict[str, Any]:
    """Merged states by the names of their slots; one that is its identity everywhere goes without saying."""
    named: dict[str, Any] = {}
    for slot, info in SLOTS.items():
        values = slot_values(words, slot)
        if slot in UNREAD or bool((values == info.identity).all()):
            continue
        named[slot.name.lower()] = values.astype(np.int64).tolist() if info.dtype == "int64" else _rounded(values)
    if "row_max_abs" in named and named.get("score_max") == named["row_max_abs"]:
        named["score_max"] = "row_max_abs"
    return named
