"""Options that several commands share."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from foreshock.client import DEFAULT_URL, Service, given_token

Url = Annotated[str, typer.Option(envvar="FORESHOCK_URL", help="Address of the service.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Token = Annotated[
    str | None,
    typer.Option(envvar="FORESHOCK_TOKEN", help="Token of the service, with the scope that the command needs."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="FORESHOCK_TOKEN_FILE", help="File with the token, used if --token is not set."),
]


def asks_service(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap `command(client, ..., as_json=...)`: pass a client, and add --url, --token, --token-file and --json."""

    @wraps(command)
    def asked(url: Url, token: Token, token_file: TokenFile, **given: Any) -> None:
        with Service(url, given_token(token, token_file)) as client:
            command(client, **given)

    def option(name: str, kind: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)

    own = [each for name, each in inspect.signature(command).parameters.items() if name not in ("client", "as_json")]
    options = option("as_json", AsJson, False), option("url", Url, DEFAULT_URL)
    shown = inspect.Signature([*own, *options, option("token", Token, None), option("token_file", TokenFile, None)])
    vars(asked).update(__signature__=shown)
    asked.__annotations__ = {name: each.annotation for name, each in shown.parameters.items()}
    return asked
