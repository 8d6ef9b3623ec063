"""The options that several commands share."""

from typing import Annotated

import typer

Url = Annotated[str, typer.Option(envvar="FORESHOCK_URL", help="Address of the service.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines; docs/command-line.md has its shape.")]
Token = Annotated[
    str | None, typer.Option(envvar="FORESHOCK_TOKEN", help="Token with the scope that the command needs.")
]
