"""Which checkpoint a run that failed goes back to, and how: a pure function of what is known of the run.

A checkpoint is judged by the incidents of its run: one that was written while an incident was open holds the state
that the incident warns about; one that was written after the incident became critical holds the harm.
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
"""A protected checkpoint's second name starts so: the trainer does not delete it."""


def _is_second_name(path: str) -> bool:
    return path.rpartition("/")[2].startswith(SECOND_NAME)


class _Trainer(NamedTuple):
    """How a trainer loads a checkpoint, and how its program attaches foreshock and switches heads."""

    loads: tuple[str, ...]
    attaches: str
    agent: str
    """The agent, once training is prepared; empty: it exists only in the training, which `foreshock switch` reaches."""


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
"""By the trainer that wrote the checkpoint."""


class LabelledCheckpoint(BaseModel):
    """A checkpoint of a run, and what is known against it."""

    step: int
    path: str
    trainer: str
    requested: bool = Field(description="foreshock asked for it, at a warning")
    label: Label
    pinned: bool = Field(description="the last clean one before an open incident: no retention rule may delete it")


class ResumePlan(BaseModel):
    """Where a run can go back to. foreshock never goes back by itself."""

    sentence: str
    checkpoint: LabelledCheckpoint | None = Field(description="the one to resume from; null: none is known, or needed")
    commands: list[str] = Field(description="lines to run or to write into the program, in order")
    checkpoints: list[LabelledCheckpoint] = Field(description="all that are known, the newest first")


def label_of(step: int, incidents: Sequence[Incident]) -> Label:
    """What is known against a checkpoint of `step`: nothing where no incident was open at that step."""
    over = [one for one in incidents if one.before_step <= step and (one.closed_step is None or step < one.closed_step)]
    if any(step >= _harmed_step(one) for one in over):
        return "after harm"
    return "after a warning" if over else "clean"


def _harmed_step(incident: Incident) -> float:
    """The first step whose checkpoint holds the harm; infinite while there is only a warning."""
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
    """The plan for `run`. checkpoints: all that were reported; incidents: closed ones included; mitigation: the mode
    that a warning of this run switches heads to; ended: no process of the run is active."""
    open_ones = [one for one in incidents if one.closed_step is None]
    known = {(one.step, one.path): one for one in checkpoints}
    newest = sorted(known.values(), key=lambda one: (one.step, _is_second_name(one.path)), reverse=True)
    before = min((one.before_step for one in open_ones), default=None)
    labelled = [
        LabelledCheckpoint(**one.model_dump(exclude={"kind"}), label=label_of(one.step, incidents), pinned=False)
        for one in newest
    ]
    clean = (one for one in labelled if one.label == "clean")  # so older than every incident that is open
    best, since = next(clean, None), "" if before is None else f" The first open incident began at step {before:,}."
    commands: list[str] = []
    if best is not None:
        best.pinned = before is not None
    if before is None and not ended:
        best, sentence = None, f"{run} trains and has no open incident: there is nothing to go back to."
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
    """How the training resumes, and what is to be different this time, so that it does not fail again."""
    causes = {cause for one in incidents for cause in one.causes}
    load, orders = [], []
    given = [info.resume_with for cause, info in CAUSES.items() if cause in causes and info.resume_with]
    settings = [f"{trainer.attaches}run={json.dumps(run)}, {one}" for one in given]
    if back_to is not None:
        load = [line.format(path=back_to.path, step=back_to.step) for line in trainer.loads]
        if back_to.trainer == "torchtitan" and _is_second_name(back_to.path):
            # torchtitan finds a checkpoint by its step alone, and may have deleted its first name
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
