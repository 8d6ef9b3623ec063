"""The plan for resuming a failed run, as a pure function of its checkpoints and incidents.

Checkpoints are labelled by the incidents of their run: one written during an incident contains the state that the
incident warns about; one written after the incident became critical contains harmed weights.
"""

import json
import math
import shlex
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from pydantic import BaseModel, Field

from foreshock.contract.causes import CAUSES, curable
from foreshock.contract.decision import checkpoint_before
from foreshock.contract.incident import Incident
from foreshock.contract.wire import Checkpoint

Label = Literal["clean", "after a warning", "after harm"]


SECOND_NAME: Final = "foreshock-clean-"
"""Prefix of the second name of a protected checkpoint, which the trainer does not delete."""


def _is_second_name(path: str) -> bool:
    return path.rpartition("/")[2].startswith(SECOND_NAME)


class _Trainer(NamedTuple):
    """How a trainer loads a checkpoint, and how its program attaches foreshock and switches heads."""

    loads: tuple[str, ...]
    attaches: str
    agent: str
    """Expression for the agent after preparation; empty if it exists only during training (use `foreshock switch`)."""


_TRAINERS: Final = {
    "transformers": _Trainer(('trainer.train(resume_from_checkpoint="{path}")',), "TransformersCallback(", ""),
    "lightning": _Trainer(('trainer.fit(model, ckpt_path="{path}")',), "LightningCallback(", ""),
    "accelerate": _Trainer(
        ('accelerator.load_state("{path}")  # after tracker.checkpoint_with(accelerator)',),
        "AccelerateTracker(model, ",
        "tracker.agent",
    ),
    "torchtitan": _Trainer(("--checkpoint.load_step {step}",), "watch_torchtitan(trainer, ", "agent"),
    "own": _Trainer(
        ("# load {path}, then, before the first step:", "agent.begin_at({step})"),
        "attach(model, ",
        "agent",
    ),
}
"""Trainers by the name in `Checkpoint.trainer`."""


class LabelledCheckpoint(BaseModel):
    """A checkpoint of a run and its label."""

    step: int
    path: str
    trainer: str
    requested: bool = Field(description="foreshock asked for it, at a warning")
    label: Label
    pinned: bool = Field(description="the last clean one before an open incident: no retention rule may delete it")


class ResumePlan(BaseModel):
    """A plan to resume a run. foreshock never resumes a run itself."""

    sentence: str
    checkpoint: LabelledCheckpoint | None = Field(description="checkpoint to resume from; null: none known or needed")
    commands: list[str] = Field(description="lines to run or to add to the program, in order")
    checkpoints: list[LabelledCheckpoint] = Field(description="all known checkpoints, the newest first")


def label_of(step: int, incidents: Sequence[Incident]) -> Label:
    """Return the label of a checkpoint of `step`: clean if no incident was open at that step."""
    over = [one for one in incidents if one.before_step <= step and (one.closed_step is None or step < one.closed_step)]
    if any(step >= _harmed_step(one) for one in over):
        return "after harm"
    return "after a warning" if over else "clean"


def _harmed_step(incident: Incident) -> float:
    """Return the first step whose checkpoint has harmed weights; infinite while there is only a warning."""
    if any(CAUSES[cause].harms for cause in incident.causes):
        return incident.before_step
    if incident.severity != "critical":
        return math.inf
    steps = [
        head.evidence.get("suspect_step" if head.signal == "nonfinite" else "critical_step", head.raised_step)
        for head in incident.heads
        if head.severity == "critical"
    ]
    return min(steps, default=incident.before_step)


def resume_plan(
    run: str, checkpoints: Sequence[Checkpoint], incidents: Sequence[Incident], *, mitigation: str, ended: bool
) -> ResumePlan:
    """Return the plan for `run`. checkpoints: all reported ones; incidents: including closed ones; mitigation: the mode
    that a warning of this run switches heads to; ended: whether no process of the run is active."""
    open_ones = [one for one in incidents if one.closed_step is None]
    known = {(one.step, one.path): one for one in checkpoints}
    newest = sorted(known.values(), key=lambda one: (one.step, _is_second_name(one.path)), reverse=True)
    before = min((one.before_step for one in open_ones), default=None)
    labelled = [
        LabelledCheckpoint(**one.model_dump(exclude={"kind"}), label=label_of(one.step, incidents), pinned=False)
        for one in newest
    ]
    clean = (one for one in labelled if one.label == "clean")  # older than every open incident
    best, since = next(clean, None), "" if before is None else f" The first open incident began at step {before:,}."
    commands: list[str] = []
    if best is not None:
        best.pinned = before is not None
    if before is None and not ended:
        best, sentence = None, f"{run} trains and has no open incident, so it need not be resumed."
    else:
        commands = _commands(run, open_ones, mitigation, best, _trainer(best or next(iter(labelled), None)))
        found = f"none of the {len(newest)} reported checkpoints is clean" if newest else "no checkpoint was reported"
        sentence = f"{run}: {found}.{since} Look for {checkpoint_before(before or 1)} on your disks."
        if best is not None:
            sentence = f"Resume {run} from step {best.step:,}, {best.path}.{since}"
    return ResumePlan(sentence=sentence, checkpoint=best, commands=commands, checkpoints=labelled)


def _trainer(checkpoint: LabelledCheckpoint | None) -> _Trainer:
    return _TRAINERS.get("own" if checkpoint is None else checkpoint.trainer, _TRAINERS["own"])


def _commands(
    run: str, incidents: Sequence[Incident], mitigation: str, back_to: LabelledCheckpoint | None, trainer: _Trainer
) -> list[str]:
    """Return the lines that resume the training, with the changes that keep it from failing again."""
    causes = {cause for one in incidents for cause in one.causes}
    load, orders = [], []
    given = [info.resume_with for cause, info in CAUSES.items() if cause in causes and info.resume_with]
    settings = [f"{trainer.attaches}run={json.dumps(run)}, {one}" for one in given]
    if back_to is not None:
        load = [line.format(path=back_to.path, step=back_to.step) for line in trainer.loads]
        if back_to.trainer == "torchtitan" and _is_second_name(back_to.path):
            # torchtitan finds a checkpoint only by its step, and may have deleted its first name
            first_name = f"{back_to.path.rpartition('/')[0]}/step-{back_to.step}"
            load.insert(0, f"cp -al {shlex.quote(back_to.path)} {shlex.quote(first_name)}")
    if any(map(curable, causes)):
        reason, agent = "the run failed here before", trainer.agent
        orders.append(
            f'{agent}.set_mode({agent}.modes(), "{mitigation}", reason="{reason}")'
            if agent
            else f'foreshock switch {shlex.quote(run)} --mode {mitigation} --reason "{reason}"  # as soon as it trains'
        )
    if "not finite" in causes:
        orders.append("# leave out the batches that led there, or lower the learning rate")
    return [*settings, *load, *orders]
