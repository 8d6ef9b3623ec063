"""The options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Url = Annotated[str, typer.Option(envvar="FORESHOCK_URL", help="Address of the service.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Token = Annotated[
    str | None,
    typer.Option(envvar="FORESHOCK_TOKEN", help="Token of the service, with the scope that the command needs."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="FORESHOCK_TOKEN_FILE", help="File that holds the token, used when no token is given."),
]
