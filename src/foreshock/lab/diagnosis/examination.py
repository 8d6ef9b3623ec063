"""Prepare models and recorded runs for a diagnosis: measurements of each head, and other defects found."""

import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from foreshock.contract.decision import cause_of
from foreshock.contract.metrics.catalog import read as read_metric
from foreshock.lab.diagnosis.calls import Capture, Measured
from foreshock.lab.diagnosis.own_code import explained, made_by
from foreshock.lab.recording.replay import verdicts
from foreshock.lab.recording.trace import read_trace
from foreshock.monitor import Agent, attach
from foreshock.monitor.model.discovery import listed

_RECORDED: Final = {"offset": "head.score_offset", "largest": "head.row_max_abs", "ties": "head.tied_rows_one"}
"""Measurements read from a recording: names of cells, and metrics of the catalogue."""
_LAST_POINTS: Final = 8


@dataclass(frozen=True, slots=True)
class Head:
    """One head of one source. cells: known measurements by name; warned: step of the first verdict, and last cause."""

    source: str
    layer: int
    head: int
    cells: dict[str, float]
    warned: tuple[int, str] | None = None

    @property
    def place(self) -> tuple[int, int]:
        return self.layer, self.head

    def __str__(self) -> str:
        return f"layer {self.layer} head {self.head}"

    def __getitem__(self, name: str) -> float:
        return self.cells.get(name, math.nan)


@dataclass(slots=True)
class Source:
    """A recording, or a model that was run on some batches."""

    name: str
    heads: list[Head] = field(default_factory=list)
    bad_weights: list[str] | None = None
    """Names of the parameters with non-finite values; None for a recording."""
    broken: str | None = None
    """Description of where the first non-finite value was; of a recording, the sentence of the warning about it."""
    exact: bool = False
    """Whether its attention ran in float32 or wider."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the user, such as layers that were not measured and why."""


def of_factory(path: str, state: str | None, batches: int) -> Source:
    """Examine the model that `module:factory` returns together with a function for the loss of its next batch.

    The model runs in eval mode. If `state` is given, it is passed to the factory, which loads the weights from it.
    Raises ValueError if the path does not name such a function, or if the function fails.
    """
    made = made_by(path, *([] if state is None else [state]))
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ValueError(f"{path} must return (model, loss), where loss() returns the loss of the next batch")
    model, loss = made
    model.eval()  # with dropout, the error of the output cannot be computed
    said, logger = MemoryHandler(10_000, flushLevel=sys.maxsize), logging.getLogger("foreshock")
    logger.addHandler(said)
    try:
        with attach(model, url=None, spool_directory=None, quiet=True) as agent:
            source = examine(state or path, model, loss, batches, agent)
    finally:
        logger.removeHandler(said)
    lines = [record.getMessage().removeprefix("foreshock: ") for record in said.buffer]
    source.notes += [line for line in lines if "watched" in line]  # warnings about layers that are not watched
    return source


def examine(name: str, model: nn.Module, loss_of_next: Callable[[], Tensor], batches: int, agent: Agent) -> Source:
    """Run a model watched by `agent` on some batches, forward and backward, without an optimizer step.

    The agent finds the modules that compute attention during the first batch.
    """
    bad = [weight for weight, values in model.named_parameters() if not bool(values.isfinite().all())]
    source = Source(name, bad_weights=bad)
    found: dict[str, Measured] = {}
    failed: dict[str, str] = {}
    for number in range(1, 1 if bad else batches + 1):
        model.zero_grad(set_to_none=True)
        with (
            torch.compiler.set_stance("force_eager"),
            Capture(model) as capture,
            explained(f"{name}: batch {number} of {batches}"),
        ):
            loss = loss_of_next()
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                what = f"one of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
                raise ValueError(f"loss() must return a tensor of one number that requires grad, but returned {what}")
            made = list(capture.calls)  # activation checkpointing calls attention again in the backward
            if finite := bool(loss.isfinite()):
                loss.backward()  # type: ignore[no-untyped-call]
        source.broken = source.broken or capture.broken(finite=finite)
        for call in made:
            source.exact = call.spec.numerics in ("float32", "float64")
            try:
                found.setdefault(call.name, Measured(call)).add(call)
            except Exception as error:
                failed[call.name] = str(error) or type(error).__name__
        if number == 1 and source.broken is None:
            agent.step(loss.detach())
        layers = capture.layers
    for number, layer in layers.items() if not bad else ():
        if layer.name in found:
            cells = found[layer.name].cells()
            source.heads += [Head(name, number, head, own) for head, own in enumerate(cells) if own["rows"]]
        else:
            failed.setdefault(layer.name, str(layer.why_not_counted))
    for why in dict.fromkeys(failed.values()):
        source.notes.append(f"{listed(sorted(name for name in failed if failed[name] == why))}: not measured, {why}.")
    return source


def of_recording(path: Path) -> Source:
    """Read the heads of a recorded run, with the verdicts of the current detectors.

    Raises ValueError for a file that is not a trace.
    """
    trace = read_trace(path)
    counted = [words for sample in trace.samples if (words := sample.words()) is not None]
    found = {cell: np.array([read_metric(key, words) for words in counted]) for cell, key in _RECORDED.items()}
    warned: dict[tuple[int | None, int | None], tuple[int, str]] = {}
    source = Source(path.name)
    for verdict in verdicts(trace):  # a later verdict may correct the cause
        place = verdict.layer, verdict.head
        warned[place] = warned.get(place, (verdict.step, ""))[0], verdict.cause
        if verdict.layer is None and cause_of(verdict) == "not finite" and verdict.state != "cleared":
            source.broken = verdict.sentence
    for number, (layer, head) in enumerate(trace.heads):
        known = {cell: column[np.isfinite(column)] for cell, column in ((c, f[:, number]) for c, f in found.items())}
        cells = {cell: float(values[-_LAST_POINTS:].mean()) for cell, values in known.items() if len(values)}
        source.heads.append(Head(path.name, layer, head, cells, warned.get((layer, head))))
    return source
