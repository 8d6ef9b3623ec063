"""`foreshock demo --train`: one natural failure, live: untreated beside the same without its cause, and rescued.

Nothing is scripted or injected: the drift comes from the rounding of attention in bf16, the warning from the shipped
detectors with their shipped settings, the switch from the agent's own policy. What is not ordinary about the recipe is
said first (demo_show.py).
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foreshock.contract import wire
from foreshock.contract.incident_form import page_of
from foreshock.lab.demo_show import ON_CPU, ON_GPU, Show
from foreshock.lab.recording.record import Record
from foreshock.lab.service import local_service
from foreshock.lab.training.arm import RESCUED, UNTREATED, Arm, variant
from foreshock.lab.training.workers import ArmOrder, Branched, Progressed, Told, Workers, in_seconds

SECONDS = 270.0
"""Most that the training takes; a slow machine then shows fewer steps instead of a longer demo."""


_POINTS_OF_A_LEVEL = 8
"""200 steps."""


@dataclass(slots=True)
class _Story:
    """What happened, by arm, and its telling."""

    console: Console
    records: dict[str, Record] = field(default_factory=dict)
    branch_step: int | None = None

    @property
    def warning(self) -> wire.Verdict | None:
        warnings = self.records[UNTREATED.name].warnings
        return warnings[0] if warnings else None

    @property
    def switch(self) -> wire.Switched | None:
        switches = self.records[RESCUED.name].switches if RESCUED.name in self.records else []
        return switches[0] if switches else None

    def hear(self, told: Told) -> None:
        event = told.event
        self.records[told.arm].add(event)
        if isinstance(event, wire.Verdict) and event.state != "updated":
            word = "" if event.severity == "info" else f"{event.severity}: " if event.state == "raised" else "quiet: "
            self.say(told.arm, event.step, f"{word}{event.sentence}")
        elif isinstance(event, wire.Switched):
            heads = ", ".join(f"layer {layer} head {head}" for layer, head in event.heads)
            self.say(told.arm, event.step, f"{heads}: switched from {event.before[0]} to {event.after[0]}.")

    def reached(self, arm: str) -> str:
        """Loss and farthest offset at the last point of an arm."""
        record = self.records[arm]
        if not record.steps:
            return "nothing measured yet"
        row = int(np.argmax(np.abs(record.offsets[-1])))
        layer, head = record.heads[row]
        return f"loss {record.losses[-1]:.2f}, offset {record.offsets[-1][row]:+.1f} (layer {layer} head {head})"

    def say(self, arm: str, step: int, text: str) -> None:
        self.console.print(f"[bold]step {step:>5}[/bold]  {variant(arm):<11}  {text}", highlight=False)


def main(
    report: Path | None = None,
    seed: int | None = None,
    port: int = 8765,
    *,
    show: Show | None = None,
    seconds: float = SECONDS,
    agent_settings: dict[str, Any] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run the demo; what `report` gets as JSON.

    show: by default the CPU's, or the GPU's where there is one. seed: by default the one shown for it. seconds: most
    that training takes. agent_settings: of `attach`, for all arms.
    Raises OSError when the service does not start, RuntimeError when a worker fails.
    """
    console = console or Console()
    show = show or _default_show()
    recipe, seed = show.recipe, show.seed if seed is None else seed
    began = time.monotonic()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foreshock-demo-")))
        url = stack.enter_context(local_service(directory, port))
        stamp = time.strftime("%H%M%S")
        arms = (show.untreated, show.rescued, show.control)
        runs = {arm.name: f"demo-{stamp}-{variant(arm.name)}" for arm in arms}
        page = page_of(url, *runs.values())
        console.print(_opening(show, seed), highlight=False)
        console.print(f"\nLive page: [link={page}]{page}[/link]\n", soft_wrap=True)
        branch, deadline = directory / "branch.pt", in_seconds(seconds)

        def order(arm: Arm) -> ArmOrder:
            return ArmOrder(
                recipe=recipe,
                arm=arm,
                seed=seed,
                run=runs[arm.name],
                steps=recipe.steps,
                url=url,
                branch_from=branch if arm.name == RESCUED.name else None,
                leave_branch=branch if arm.name == UNTREATED.name else None,
                deadline=deadline,
                agent_settings=agent_settings or {},
            )

        story = _train(show, order, console)
        result = _result(story, show, seed, page, time.monotonic() - began)
        reached = min(arm["steps"] for arm in result["arms"].values())
        for name, arm in result["arms"].items():
            arm["loss_where_all_are"] = story.records[name].loss_before(reached)
        console.print(f"\n{comparison(result)}")
        if report is not None:
            report.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
            console.print(f"\nReport: {report}")
        if console.is_terminal and sys.stdin.isatty():
            console.input("\nThe live page stays up until you press Enter. ")
    return result


def _default_show() -> Show:
    import torch

    return ON_GPU if torch.cuda.is_available() else ON_CPU


def _opening(show: Show, seed: int) -> str:
    """What one is about to see, and what is natural about it."""
    return (
        f"One small GPT is trained three times from seed {seed}, on the same batches:\n"
        f"  {'baseline':<11}  left alone\n"
        f"  {show.control.name:<11}  {show.without_is}\n"
        f"  {'rescued':<11}  goes on from the baseline just before its first warning; its agent may switch "
        f"(to {show.rescued.mitigation})\n"
        "Watch the score offset: how far all scores of a head have moved together, in nats. It is measured of the "
        f"scores as they are: {show.rescued.mitigation} does not move them. A warning, then a switch, should come. "
        "Nothing is scripted: detectors and switch are as shipped. One setting of the agent is not: it counts every "
        f"row, every {show.recipe.sample_every_steps} steps, where by default it measures a sample of them.\n\n"
        f"{show.recipe.summary} {show.starts_from}"
    )


def _train(show: Show, order: Callable[[Arm], ArmOrder], console: Console) -> _Story:
    """Baseline and what it is held against side by side, and the rescued arm from the warning on."""
    workers, story = Workers(), _Story(console)
    columns = (TextColumn("{task.description:<11}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bars: dict[str, Any] = {}
        tenths: dict[str, int] = {}
        """Of the steps, told line by line where there is no terminal to draw a bar on."""

        def start(arm: Arm, shared: Record) -> None:
            ordered = order(arm)
            story.records[arm.name] = shared
            bars[arm.name] = progress.add_task(variant(arm.name), total=ordered.steps)
            workers.start(ordered)

        try:
            start(show.untreated, Record())
            start(show.control, Record())
            for message in workers.messages():
                match message:
                    case Progressed(arm_name, step):
                        progress.update(bars[arm_name], completed=step)
                        if not console.is_terminal and tenths.get(arm_name) != (
                            tenth := 10 * step // show.recipe.steps
                        ):
                            tenths[arm_name] = tenth
                            story.say(arm_name, step, f"of {show.recipe.steps}; {story.reached(arm_name)}.")
                    case Told():
                        story.hear(message)
                    case Branched(_, step):
                        story.branch_step = step
                        start(show.rescued, story.records[UNTREATED.name].until(step))
                        story.say(RESCUED.name, step, "branches here, identical so far; policy auto from now on.")
        finally:
            workers.stop()
    return story


def _result(story: _Story, show: Show, seed: int, page: str, seconds: float) -> dict[str, Any]:
    first, recipe = story.warning, show.recipe
    return {
        "recipe": recipe.name,
        "on_gpu": recipe.on_gpu,
        "numerics": show.numerics,
        "mitigation": show.rescued.mitigation,
        "control": show.control.name,
        "seed": seed,
        "planned_steps": recipe.steps,
        "seconds": round(seconds, 1),
        "page": page,
        "first_warning_step": first.step if first else None,
        "first_warning": None
        if first is None
        else first.model_dump(
            mode="json",
            include={
                "layer",
                "head",
                "signal",
                "cause",
                "severity",
                "evidence",
                "forecast_steps",
                "forecast_low_steps",
                "forecast_high_steps",
                "sentence",
            },
        ),
        "branch_step": story.branch_step,
        "switch_step": story.switch.step if story.switch else None,
        "arms": {name: record.summary() for name, record in story.records.items()},
    }


def _furthest(arms: dict[str, Any], control: str) -> str:
    """How far the head that lies furthest from its own self in the control has come."""
    here, there = (list(arms[arm]["offset_by_step"].values())[-1:] for arm in (UNTREATED.name, control))
    if not here or not there:
        return "Nothing was measured in that time."
    gap, row = max((abs(a - b), row) for row, (a, b) in enumerate(zip(here[0], there[0], strict=True)))
    layer, head = arms[UNTREATED.name]["heads"][row]
    return (
        f"Layer {layer} head {head} drifted furthest: its score offset is {here[0][row]:+.2f} nats, "
        f"{gap:.2f} from the same head of {control}."
    )


def comparison(result: dict[str, Any]) -> str:
    """The report in words."""
    arms, first, control = result["arms"], result["first_warning"], result["control"]
    warnings = arms[control]["warnings"]
    quiet = f"{control} stayed quiet" if not warnings else f"{control} was warned about {warnings} times"
    if first is None:
        steps = arms[UNTREATED.name]["steps"]
        return (
            f"No head was warned about within {steps} of {result['planned_steps']} steps on this seed and machine; "
            f"other processors round otherwise. {_furthest(arms, control)} The run {quiet}."
        )
    row = arms[UNTREATED.name]["heads"].index([first["layer"], first["head"]])

    reached = min(arm["steps"] for arm in arms.values())

    def level(arm: str, until: int = reached) -> float:
        """Mean offset of the named head over the last points up to a step: a single one is noisy."""
        series = [offsets[row] for step, offsets in arms[arm]["offset_by_step"].items() if int(step) <= until]
        last = series[-_POINTS_OF_A_LEVEL:]
        return float(sum(last) / len(last))

    ends = {arm: level(arm) for arm in arms}
    told = ", ".join(f"{variant(arm)} {end:+.2f}" for arm, end in ends.items())
    lines = [
        f"Layer {first['layer']} head {first['head']} was warned about at step {result['first_warning_step']} "
        f"(signal {first['signal']}, cause {first['cause']}). The run {quiet}.",
        f"Score offset of that head at step {reached}: {told} nats.",
    ]
    if result["switch_step"] is not None:
        before = level(UNTREATED.name, until=result["switch_step"])
        steps = reached - result["switch_step"]
        lines.append(
            f"It was switched to {result['mitigation']} at step {result['switch_step']}, at {before:+.2f}. "
            f"In the {steps} steps since then it moved by {ends[UNTREATED.name] - before:+.2f} in the baseline and by "
            f"{ends[RESCUED.name] - before:+.2f} in the rescued run."
        )
    if reached < result["planned_steps"]:
        lines.append(
            f"The demo's time ran out at step {reached} of {result['planned_steps']}; "
            "a quicker machine, or one that is less busy, gets further."
        )
    losses = ", ".join(f"{variant(name)} {arm['loss_where_all_are']:.3f}" for name, arm in arms.items())
    scores = ", ".join(f"{variant(name)} {arm['largest_score']:.1f}" for name, arm in arms.items())
    lines.append(f"Loss over the 500 steps before: {losses}. Largest |score| of any head: {scores}.")
    if not result.get("on_gpu"):
        lines.append(
            "Such a drift comes before a failure, which takes a larger model and a GPU. Recorded ones: foreshock demo"
        )
    return "\n".join(lines)
