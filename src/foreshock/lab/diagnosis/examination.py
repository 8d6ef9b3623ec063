"""Models and recorded runs as a diagnosis reads them: quantities of each head, and what else is wrong."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from foreshock.contract.metrics.catalog import read as read_metric
from foreshock.contract.slots import Floats
from foreshock.lab.diagnosis.calls import Capture, measured
from foreshock.lab.diagnosis.own_code import explained, made_by
from foreshock.lab.diagnosis.weights import load_weights, read, some
from foreshock.lab.recording.replay import verdicts
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.training.recipes import Recipe
from foreshock.lab.training.run import Training
from foreshock.lab.training.variant import Variant
from foreshock.monitor import Agent, attach

_RECORDED: Final = {"offset": "head.score_offset", "largest": "head.row_max_abs", "ties": "head.tied_rows_one"}
"""What a recording tells of a head: metrics of the catalogue by the names of cells."""
_LAST_POINTS: Final = 8
_ONE_SIGN: Final = 0.75
"""Least mean over RMS of what the scores of a row share. Drifting heads had 0.70 to 0.97, heads that a learning rate
blew up 0.17 to 0.81, those with the other sign of offset; healthy heads with a large RMS have 0.1."""


@dataclass(frozen=True, slots=True)
class Head:
    """One head of one source. `cells`: quantities by name, those that are known."""

    source: str
    layer: int
    head: int
    cells: dict[str, float | str]

    @property
    def place(self) -> tuple[int, int]:
        return self.layer, self.head

    def __str__(self) -> str:
        return f"layer {self.layer} head {self.head}"

    def __getitem__(self, name: str) -> float:
        return float(self.cells.get(name, math.nan))


@dataclass(slots=True)
class Source:
    """A recording, or a model that was run on some batches."""

    name: str
    heads: list[Head] = field(default_factory=list)
    bad_weights: list[str] | None = None
    """Names of the parameters with values that are not finite; None for a recording."""
    broken: str | None = None
    """Where a value was the first that is not finite, in words."""
    exact: bool = False
    """Whether its attention ran in float32 or wider."""
    notes: list[str] = field(default_factory=list)
    """What was left out, and what a person should know of the weights."""


def of_checkpoint(path: Path, batches: int) -> Source:
    """The model of a laboratory checkpoint (`foreshock lab run`), run on the batches that came next, by
    the attention that trained it. Raises ValueError for a file that is not one."""
    saved = read(path)
    if not {"recipe", "arm", "seed", "model", "batches", "step"} <= saved.keys():
        raise ValueError(
            f"{path} is not a checkpoint of the laboratory; for another model give module:factory and --state"
        )
    recipe = TypeAdapter(Recipe).validate_python(saved["recipe"])
    variant = TypeAdapter(Variant).validate_python(saved["arm"])
    training = Training(replace(recipe, compiled=False), variant, int(saved["seed"]))
    with training.agent:
        # What trained it plays no part: a diagnosis takes no step.
        training.restore(training.checkpoint() | {key: saved[key] for key in ("model", "batches", "step")})
        return examine(f"step {saved['step']}", training.model, training.next_loss, batches)


def of_factory(path: str, state: Path | None, batches: int) -> Source:
    """What `module:factory` makes, run in eval mode: a model, and a function that gives the loss of its next batch.

    The weights in `state`, a file or a folder, are loaded into the model. Raises ValueError when the path does not name
    such a function, or when weights and model do not belong together.
    """
    made = made_by(path)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ValueError(f"{path} is no function that returns (model, loss), loss() being the loss of the next batch")
    model, loss = made
    notes = load_weights(model, state) if state is not None else []
    model.eval()  # dropped weights cannot be taken apart
    with _warnings() as said, attach(model, url=None, spool_directory=None, quiet=True) as agent:
        source = examine(path if state is None else str(state), model, loss, batches, agent)
    source.notes += notes + [line for line in said if "watched" in line]
    return source


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What an agent warns of: it names the layers that are not watched."""
    logger, said, handler = logging.getLogger("foreshock"), list[str](), logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage().removeprefix("foreshock: "))  # type: ignore[method-assign]
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def examine(
    name: str, model: nn.Module, loss_of_next: Callable[[], Tensor], batches: int, agent: Agent | None = None
) -> Source:
    """Run a model that is watched on some batches, forward and backward, without a step of its optimizer. `agent`: the
    one that watches it, where the first batch has yet to show which modules compute attention."""
    bad = [weight for weight, values in model.named_parameters() if not bool(values.isfinite().all())]
    source = Source(name, bad_weights=bad)
    found: dict[str, list[dict[str, Floats]]] = {}
    left_out: dict[str, set[str]] = {}
    for number in range(1, 1 if bad else batches + 1):
        model.zero_grad(set_to_none=True)
        with torch.compiler.set_stance("force_eager"), Capture(model) as capture:
            with explained(f"{name}: the loss of batch {number} of {batches}"):
                loss = loss_of_next()
            _check(loss, name)
            made = list(capture.calls)  # in the backward checkpointing calls attention once more
            if finite := bool(loss.isfinite()):
                with explained(f"{name}: the backward of batch {number}"):
                    loss.backward()  # type: ignore[no-untyped-call]
        source.broken = source.broken or capture.broken(finite=finite)
        for call in made:
            source.exact = call.spec.numerics in ("float32", "float64")
            try:
                found.setdefault(call.name, []).append(measured(call))
            except Exception as error:
                left_out.setdefault(f"not measured, {error or type(error).__name__}", set()).add(call.name)
        if agent is not None and number == 1 and source.broken is None:
            agent.step(loss.detach())
        layers = capture.layers
    met = {layer for names in (*left_out.values(), {at for at in found if found[at]}) for layer in names}
    for number, layer in layers.items() if not bad else ():
        if calls := found.get(layer.name):
            source.heads += [Head(name, number, head, _cells(head, calls)) for head in range(len(calls[0]["rows"]))]
        elif layer.name not in met:
            left_out.setdefault(f"not measured, {layer.why_not_counted}", set()).add(layer.name)
    source.notes = [f"{some(sorted(at))}: {why}." for why, at in left_out.items()]
    return source


def _check(loss: object, name: str) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"{name}: loss() gave {what}; give the loss as a tensor of one number, with its graph")
    if not loss.requires_grad:
        raise ValueError(f"{name}: the loss has no graph: no parameter is trained, or loss() runs under torch.no_grad")


def _cells(head: int, calls: Sequence[dict[str, Floats]]) -> dict[str, float | str]:
    """Quantities of one head over all calls of its layer."""
    values = {name: np.array([call[name][head] for call in calls], dtype=np.float64) for name in calls[0]}
    known = {name: column[np.isfinite(column)] for name, column in values.items()}
    cells: dict[str, Any] = {name: float(column.mean()) for name, column in known.items() if len(column)}
    offset, common = cells.get("offset", math.nan), cells.pop("common", math.nan)
    together = common * offset > 0 and abs(common) >= _ONE_SIGN * cells.pop("common rms", math.nan)
    cells["shift"] = min(common, offset, key=abs) if together else 0.0
    cells |= {"largest": float(known["largest"].max(initial=0.0)), "rows": float(known["rows"].sum())}
    cells["empty"] = float(known["empty"].sum()) / max(cells["rows"], 1.0)
    return cells


def of_recording(path: Path) -> Source:
    """Every head of a recorded run, with what today's detectors say. Raises ValueError for a file that is no trace."""
    trace = read_trace(path)
    counted = [words for sample in trace.samples if (words := sample.words()) is not None]
    found = {cell: np.array([read_metric(key, words) for words in counted]) for cell, key in _RECORDED.items()}
    warned: dict[tuple[int | None, int | None], tuple[int, str]] = {}
    for verdict in verdicts(trace):  # a later one may correct the cause
        first = warned.get((verdict.layer, verdict.head), (verdict.step, ""))[0]
        warned[verdict.layer, verdict.head] = first, verdict.cause
    source = Source(path.name)
    for number, place in enumerate(trace.heads):
        known = {cell: column[np.isfinite(column)] for cell, column in ((c, f[:, number]) for c, f in found.items())}
        cells: dict[str, float | str] = {c: float(v[-_LAST_POINTS:].mean()) for c, v in known.items() if len(v)}
        if place in warned:
            cells["warned"] = ", ".join(map(str, warned[place]))
        source.heads.append(Head(path.name, *place, cells))
    return source
