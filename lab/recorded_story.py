"""The recorded explosion: what `foreshock demo` tells where its own training showed no warning."""

from pathlib import Path
from typing import Any, Final

from rich.console import Console

from foreshock.lab.picture import draw
from foreshock.lab.recording.record import Record
from foreshock.lab.recording.replay import replay
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.scoring.harm import first_harm
from foreshock.lab.training.arm import CONTROL, RESCUED, UNTREATED, variant
from foreshock.monitor.detect.signals import DANGEROUS_SCORE

TRACES: Final = Path(__file__).parent / "traces" / "cure"
FILES: Final = {
    UNTREATED.name: "shared-values_untreated_seed2.jsonl.gz",
    RESCUED.name: "shared-values_rescued-all-row-corrected_seed2.jsonl.gz",
    CONTROL.name: "shared-values_control_seed2.jsonl.gz",
}


def tell(console: Console, url: str, stamp: str, picture: Path, folder: Path = TRACES) -> dict[str, Any]:
    """Judge the three recorded runs by the detectors of today, show them on the page at `url`, and tell what happened.

    Nothing of the telling is written down beforehand: the warning, the switch and the losses are read off the runs.
    """
    missing = [name for name in FILES.values() if not (folder / name).exists()]
    if missing:
        console.print(
            f"The recorded runs are not installed ({missing[0]}); they are part of the repository, in lab/traces."
        )
        return {}
    console.print(
        "\nWhat it looks like where it happens: recorded runs of recipe shared-values, seed 2, trained on an H200.\n"
        "Three trainings of one recipe and seed: left alone, switched by the agent at its warning, and in float32."
    )
    records = {arm: Record() for arm in FILES}
    for arm, name in FILES.items():
        replay(folder / name, url=url, run=f"recorded-{stamp}-{variant(arm)}", on_event=records[arm].add)
    untreated, rescued, control = (records[arm] for arm in FILES)
    steps, control_steps = (read_trace(folder / FILES[arm]).steps for arm in (UNTREATED.name, CONTROL.name))
    harm = first_harm(steps, control_steps)
    told: dict[str, Any] = {"losses": {arm: record.final_loss for arm, record in records.items()}}
    lines = []
    if untreated.warnings:
        first = untreated.warnings[0]
        told |= {"first_warning_step": first.step, "layer": first.layer, "head": first.head}
        lines.append((first.step, UNTREATED.name, f"{first.severity}: {first.sentence}"))
    grown = [
        step for step, scores in zip(untreated.steps, untreated.scores, strict=True) if scores.max() >= DANGEROUS_SCORE
    ]
    if grown:
        told["dangerous_step"] = grown[0]
        lines.append((grown[0], UNTREATED.name, f"a score reaches {DANGEROUS_SCORE:.0f}; in bf16 it is off by 1."))
    if harm is not None:
        told["harm_step"] = harm.step
        lines.append((harm.step, UNTREATED.name, f"the {harm.by} leaves that of the float32 training."))
    if rescued.switches:
        switch = rescued.switches[0]
        told["switch_step"] = switch.step
        lines.append(
            (
                switch.step,
                RESCUED.name,
                f"warned; {len(switch.heads)} heads switched to {switch.after[0]} by the agent.",
            )
        )
    for step, arm, text in sorted(lines):
        console.print(f"[bold]step {step:>5}[/bold]  {variant(arm):<9}  {text}", highlight=False)
    ends = ", ".join(f"{variant(arm)} {record.final_loss:.3f}" for arm, record in records.items())
    console.print(
        f"Loss over the last 500 steps: {ends}. Warnings about the float32 training: {len(control.warnings)}.",
        highlight=False,
    )
    head = (told.get("layer") or 0, told.get("head") or 0)
    marks = {"warned": told.get("first_warning_step"), "switched": told.get("switch_step")}
    draw(
        picture,
        {variant(name): record for name, record in records.items()},
        head,
        "recorded: shared-values, seed 2, on an H200",
        marks,
    )
    return told
