"""`foreshock replay` as text on the terminal."""

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from foreshock.cli.output import print_json_line
from foreshock.contract import wire
from foreshock.contract.incident import page_of
from foreshock.lab.recording.pace import Pace
from foreshock.lab.recording.replay import replay, run_of
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.service import local_service


def play(
    trace: Path,
    console: Console,
    *,
    url: str | None,
    token: str | None,
    run: str | None,
    port: int,
    steps_per_second: float | None,
    offline: bool,
    as_json: bool = False,
) -> None:
    """Replay a trace into `url`, into a service of its own, or (offline) onto the terminal alone.

    Raises ValueError for a file that is no trace, before anything is started. As JSON every event is a line, and the
    last one says what was played.
    """
    played = read_trace(trace)
    with ExitStack() as stack:
        own = url is None and not offline
        if own:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="foreshock-replay-"))
            url = stack.enter_context(local_service(Path(directory), port))
        if url is not None and not as_json:
            console.print(f"Live page: {page_of(url, run or run_of(trace))}", soft_wrap=True)

        raised: list[wire.Verdict] = []

        def print_event(event: wire.Event) -> None:
            if isinstance(event, wire.Verdict) and event.state == "raised":
                raised.append(event)
            if as_json:
                if isinstance(event, wire.Verdict | wire.Switched):
                    print_json_line(event.model_dump(mode="json"))
            elif isinstance(event, wire.Verdict) and event.state != "updated":
                console.print(f"[bold]step {event.step:>6}[/bold]  {event.state}: {event.sentence}", highlight=False)
            elif isinstance(event, wire.Switched):
                heads = ", ".join(f"layer {layer} head {head}" for layer, head in event.heads)
                text = f"{heads}: {event.outcome}, {', '.join(sorted(set(event.after)))}"
                console.print(f"[bold]step {event.step:>6}[/bold]  {text}", highlight=False)

        pace = Pace(steps_per_second)
        name = replay(trace, played, url=url, token=token, run=run, pace=pace, on_event=print_event)
        if as_json:
            print_json_line({"kind": "played", "trace": trace.name, "run": name if url else None, "url": url})
        else:
            healthy = "" if raised else ": no head was warned about"
            console.print(f"{trace.name} was played" + (f" as run {name}" if url else "") + f"{healthy}.")
        if own and not as_json and console.is_terminal and sys.stdin.isatty():
            console.input("The live page stays up until you press Enter. ")
