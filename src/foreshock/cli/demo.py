"""`foreshock demo`: replay recorded failures on a temporary live page, with comments on the terminal."""

from typing import Final

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from foreshock.contract import wire
from foreshock.lab.recording.replay import replay
from foreshock.lab.shown.page import own_page
from foreshock.lab.shown.story import NAMES, Story, opening, recordings

STEPS_PER_SECOND: Final = 100.0
"""At this speed the first warning comes within half a minute, and the end within two minutes."""
_LINES_OF_A_RUN: Final = 10
"""Number of times that the loss and the largest score of each run are printed."""


def play(console: Console, *, port: int = 8765, steps_per_second: float | None = STEPS_PER_SECOND) -> Story:
    """Replay the recorded runs, print a commentary, and return it. steps_per_second: None is as fast as possible.

    Raises OSError if the service does not start.
    """
    traces, story = recordings(), Story()
    console.print("[bold]Recorded failures, played back.[/bold] Nothing is trained: foreshock demo --train does that.")
    for name, text in opening(traces):
        console.print(_hanging("", name, text) if name else f"\n{text}\n", highlight=False)
    with own_page(console, port, *NAMES) as url:
        last_step = max(trace.samples[-1].step for trace in traces.values())
        told = dict.fromkeys(traces, -1)

        def hear(run: str, event: wire.Event) -> None:
            for whose, sentence in story.hear(run, event):
                console.print(_hanging(f"step {event.step:>6,}", whose, sentence), highlight=False)
            record, part = story.records[run], _LINES_OF_A_RUN * event.step // last_step
            if record.steps and told[run] != part:
                told[run] = part
                reached = f"loss {record.losses[-1]:.3f}  largest score {record.largest[-1]:>6,.0f}"
                console.print(_hanging(f"step {event.step:>6,}", run, reached), highlight=False)

        replay(traces, url=url, steps_per_second=steps_per_second, on_event=hear)
        for sentence in story.ending():
            console.print(f"\n{sentence}", highlight=False)
    return story


def _hanging(head: str, name: str, text: str) -> RenderableType:
    """Lay out `head`, the name of a run and `text` in columns; long text wraps within its column."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True, min_width=max(map(len, NAMES)))
    table.add_column(ratio=1)
    table.add_row(head, name, Text(text))
    return table
