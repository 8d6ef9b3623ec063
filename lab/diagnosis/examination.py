"""The paper's appendix F as a tool: where the failure is, what carries it, whether it is rounding, what to do.

A recorded or live run tells where and since when. Which tokens and features carry the error of delta, how much of the
gradient's error it is, and how alike the directions are can only be read from tensors: a checkpoint of the laboratory,
or any model with its loss.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from foreshock.contract.slots import Floats
from foreshock.kernels.flash_attention.spec import Numerics
from foreshock.lab.diagnosis.anatomy import Examined, broken_part, examine
from foreshock.lab.diagnosis.head_anatomy import head_anatomy
from foreshock.lab.diagnosis.own_code import explained, made_by
from foreshock.lab.diagnosis.tables import Diagnosis, HeadCourse, advise
from foreshock.lab.diagnosis.verdict import Verdict, Vitals
from foreshock.lab.diagnosis.weights import load_weights, not_finite, read
from foreshock.lab.recording.history import History
from foreshock.lab.training.arm import Arm
from foreshock.lab.training.capture import Capture
from foreshock.lab.training.recipes import Recipe
from foreshock.lab.training.run import Training
from foreshock.monitor import attach

_SHOWN_HEADS: Final = 4
_LAST_POINTS: Final = 8


@dataclass(frozen=True, slots=True)
class Patient:
    """A model with a loss to run it by, and what it is called."""

    origin: str
    model: nn.Module
    loss: Callable[[], Tensor]
    """each call runs the model on its next batch and gives the loss with its graph"""
    notes: list[str] = field(default_factory=list)
    """what a person should know of the weights"""


def checkpoint_run(path: Path) -> tuple[Recipe, Arm, int]:
    """Recipe, arm and seed of the run that left a laboratory checkpoint. Raises ValueError for a file that is none."""
    saved = read(path)
    if not {"recipe", "arm", "seed", "model", "batches", "step"} <= saved.keys():
        raise ValueError(
            f"{path} is no checkpoint of the laboratory; for another model give module:factory and --state"
        )
    recipe, arm = TypeAdapter(Recipe).validate_python(saved["recipe"]), TypeAdapter(Arm).validate_python(saved["arm"])
    return recipe, arm, int(saved["seed"])


@contextmanager
def lab_patient(path: Path) -> Iterator[Patient]:
    """The model of a laboratory checkpoint (`foreshock lab run --checkpoint`) on the batches that came next.

    Our kernels compute its attention, whose tensors are looked at, where the run kept PyTorch's own. Raises ValueError
    for a file that is none.
    """
    saved, (recipe, arm, seed) = read(path), checkpoint_run(path)
    training = Training(replace(recipe, compiled=False), replace(arm, backend=None), seed)
    with training.agent, training.on_stream():
        # What trained it plays no part: a diagnosis takes no step.
        training.restore(training.checkpoint() | {key: saved[key] for key in ("model", "batches", "step")})
        yield Patient(f"step {saved['step']}", training.model, training.next_loss)


@contextmanager
def own_patient(path: str, state: Path | None) -> Iterator[Patient]:
    """What `module:factory` makes, in eval mode: a model, and a function that gives the loss of its next batch.

    The weights in `state`, a file or a folder, are loaded into the model. Raises ValueError when the path names nothing
    of the kind, or when weights and model do not belong together.
    """
    made = made_by(path)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ValueError(f"{path} is no function that returns (model, loss), loss() being the loss of the next batch")
    model, loss = made
    notes = load_weights(model, state) if state is not None else []
    model.eval()  # dropped weights cannot be taken apart
    with attach(model, attention="kernels", url=None, spool_directory=None, quiet=True):
        yield Patient(path if state is None else str(state), model, loss, notes=notes)


def examine_patient(
    patient: Patient, batches: int, numerics: Numerics | None
) -> tuple[Vitals, dict[int, list[Examined]]]:
    """Run the model on some batches, forward and backward, without a step; every layer's measurements.

    Layers with values that are not finite are named and not measured.
    """
    vitals = Vitals(patient.origin, bad_weights=not_finite(patient.model), notes=patient.notes)
    found: dict[int, list[Examined]] = {}
    met = False
    for number in range(1, 1 if vitals.bad_weights else batches + 1):
        patient.model.zero_grad(set_to_none=True)
        with Capture(patient.model) as capture:
            with explained(f"{patient.origin}: the loss of batch {number} of {batches}"):
                loss = patient.loss()
            _check(loss, patient.origin)
            with explained(f"{patient.origin}: the backward of batch {number}"):
                loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        last = {call.layer: call for call in capture.calls if call.grad_out is not None}
        met |= bool(last)
        for layer, call in sorted(last.items()):
            if broken := broken_part(call):
                vitals.broken.setdefault(layer, broken)
            else:
                found.setdefault(layer, []).append(examine(call, patient.origin, numerics))
    if not met and not vitals.bad_weights:
        raise ValueError(f"{patient.origin}: no watched layer took part in the loss and its backward")
    return vitals, found


def _check(loss: object, origin: str) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"{origin}: loss() gave {what}; give the loss as a tensor of one number, with its graph")
    if not loss.requires_grad:
        raise ValueError(
            f"{origin}: the loss has no graph: no parameter is trained, or loss() runs under torch.no_grad"
        )


def diagnose(
    histories: Sequence[History],
    examined: dict[int, list[Examined]],
    *,
    heads: Sequence[tuple[int, int]] = (),
    verdict: Verdict | None = None,
) -> Diagnosis:
    """Put together what a run recorded and what its tensors say of `heads`, by default of the `suspects`."""
    named = list(heads) or suspects(histories, examined, verdict)
    result = Diagnosis(sources=[each.name for each in histories], named=named, verdict=verdict)
    result.sources += list(dict.fromkeys(each.origin for batches in examined.values() for each in batches))
    for layer, head in named:
        result.courses += [_course(history, (layer, head)) for history in histories]
        if layer in examined:
            known = len(examined[layer][0].offset)
            if head >= known:
                raise ValueError(f"layer {layer} has no head {head}; its heads are 0 to {known - 1}")
            result.anatomies.append(head_anatomy(layer, head, examined[layer]))
        elif examined:
            raise ValueError(f"layer {layer} was not examined; the model has layers {', '.join(map(str, examined))}")
    result.advice = advise(result)
    return result


def suspects(
    histories: Sequence[History], examined: dict[int, list[Examined]], verdict: Verdict | None = None
) -> list[tuple[int, int]]:
    """The heads that were warned about, first first; without any, the one that the verdict is about, or whose scores
    drifted farthest."""
    warned = [
        (verdict.layer, verdict.head)
        for history in histories
        for verdict in history.verdicts
        if verdict.state == "raised" and verdict.layer is not None and verdict.head is not None
    ]
    if warned:
        return list(dict.fromkeys(warned))[:_SHOWN_HEADS]
    if verdict is not None and verdict.head is not None and not histories:
        return [verdict.head]
    drift: dict[tuple[int, int], float] = {}
    for history in histories:
        for ref in history.heads:
            drift[ref] = max(drift.get(ref, 0.0), abs(_last(history.course("head.score_offset", ref)) or 0.0))
    for layer, batches in examined.items() if not histories else ():
        for head, offset in enumerate(torch.stack([each.offset for each in batches]).mean(0).tolist()):
            drift[layer, head] = abs(offset)
    return sorted(drift, key=lambda head: -drift[head])[:1]


def _course(history: History, head: tuple[int, int]) -> HeadCourse:
    raised = [v for v in history.verdicts if (v.layer, v.head) == head and v.state == "raised"]
    offset, (_, bias) = history.course("head.score_offset", head), history.blocks("head.delta_bias", head)
    mean, spread = (float(bias.mean()), float(bias.std())) if len(bias) > 1 else (math.nan, math.nan)
    norm = _last(history.course("head.query_norm", head))
    others = [_last(history.course("head.query_norm", other)) for other in history.heads if other != head]
    known = [other for other in others if other is not None]
    middle, end = _last(offset[: len(offset) // 2]), _last(offset)
    return HeadCourse(
        layer=head[0],
        head=head[1],
        warned_step=raised[0].step if raised else None,
        cause=raised[0].cause if raised else None,
        offset=end,
        offset_change=None if middle is None or end is None else end - middle,
        largest_score=_last(history.course("head.row_max_abs", head)),
        delta_one_sidedness=mean if len(bias) > 1 else None,
        delta_same_sign=float((np.sign(bias) == np.sign(mean)).mean()) if len(bias) > 1 else None,
        delta_z=mean / (spread / math.sqrt(len(bias))) if spread > 0 else None,
        tied_rows=_last(history.course("head.tied_rows_one", head)),
        query_norm=norm,
        query_norm_over_others=norm / float(np.median(known)) if norm is not None and any(known) else None,
    )


def _last(values: Floats) -> float | None:
    """Mean of the last points that were recorded."""
    known = values[np.isfinite(values)][-_LAST_POINTS:]
    return float(known.mean()) if len(known) else None
