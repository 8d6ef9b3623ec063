"""`foreshock replay`: replay a recorded run on the terminal and on a live page."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foreshock.cli.options import AsJson, Token, TokenFile
from foreshock.client import given_token
from foreshock.contract import wire
from foreshock.contract.incident import heads_in_words, page_of


def replay(
    trace: Annotated[Path, typer.Argument(help="A recorded run (.trace.xz or .jsonl.gz).")],
    url: Annotated[
        str | None, typer.Option(help="Service to send the run to; by default a new one is started.")
    ] = None,
    token: Token = None,
    token_file: TokenFile = None,
    run: Annotated[str | None, typer.Option(help="Name of the replayed run.")] = None,
    port: Annotated[int, typer.Option(help="Port of the service that is started; 0 takes a free one.")] = 8765,
    steps_per_second: Annotated[
        float | None, typer.Option(help="Speed; by default as fast as possible.", min=0.001)
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Print the verdicts only, without a service.")] = False,
    as_json: AsJson = False,
) -> None:
    """Play a recorded run through the same detectors, service and page."""
    from foreshock.cli import output
    from foreshock.lab.recording import replay as player
    from foreshock.lab.recording.trace import read_trace
    from foreshock.lab.shown.page import own_page

    token, console = given_token(token, token_file), output.console()
    played = read_trace(trace)  # before a service is started
    name = run or f"replay-{played.name}"
    with ExitStack() as stack:
        if url is None and not offline:
            url = stack.enter_context(
                own_page(Console(quiet=True, force_terminal=False) if as_json else console, port, name)
            )
        elif url is not None and not as_json:
            console.print(f"Live page: {page_of(url, name)}", soft_wrap=True)
        raised: list[wire.Verdict] = []

        def print_event(_: str, event: wire.Event) -> None:
            if isinstance(event, wire.Verdict) and event.state == "raised":
                raised.append(event)
            if as_json:
                if isinstance(event, wire.Verdict | wire.Switched):
                    output.print_json_line(event.model_dump(mode="json"))
            elif isinstance(event, wire.Verdict) and event.state != "updated":
                console.print(f"[bold]step {event.step:>6}[/bold]  {event.state}: {event.sentence}", highlight=False)
            elif isinstance(event, wire.Switched):
                text = f"{heads_in_words(event.heads)}: {event.outcome}, {', '.join(sorted(set(event.after)))}"
                console.print(f"[bold]step {event.step:>6}[/bold]  {text}", highlight=False)

        player.replay({name: played}, url=url, token=token, steps_per_second=steps_per_second, on_event=print_event)
        if as_json:
            output.print_json_line({"kind": "played", "trace": trace.name, "run": name if url else None, "url": url})
        else:
            healthy = "" if raised else ": no head was warned about"
            console.print(f"{trace.name} was played" + (f" as run {name}" if url else "") + f"{healthy}.")
