"""One way to end a command in error: a sentence on standard error and a non-zero exit code."""

import os
import sys
from typing import Any

from pydantic import ValidationError
from typer.core import TyperGroup

from foreshock.cli.output import shown
from foreshock.client import ServiceError

_EXTRAS = {
    "torch": "agent",
    "triton": "agent",
    "fastapi": "server",
    "uvicorn": "server",
    "sqlalchemy": "server",
    "prometheus_client": "server",
    "structlog": "server",
    "matplotlib": "dev",
    "grafana_api": "grafana",
    "grafana_foundation_sdk": "grafana",
    "transformers": "dev",
    "yaml": "grafana",
}


class CommandError(Exception):
    """A command cannot go on; the message is the sentence that the person reads."""


def sentence(error: Exception) -> str:
    """What a person reads for an error of configuration, input or a missing extra."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        extra = _EXTRAS.get(error.name.partition(".")[0])
        if extra:
            how = f"pip install '.[{extra}]' in foreshock's clone"
            return f"this command needs {error.name}, which is not installed: {how}"
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
    return str(error)


class Commands(TyperGroup):
    """A group whose commands end in a sentence instead of a traceback for what the person can mend."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; see the class."""
        try:
            done = super().invoke(ctx)
            sys.stdout.flush()  # here, where a reader that has gone is no error
            return done
        except BrokenPipeError:  # `| head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is buffered has nowhere to go at the end either
            sys.exit(0)
        except (CommandError, ServiceError, ModuleNotFoundError, ValueError, OSError) as error:
            if isinstance(error, ModuleNotFoundError) and sentence(error) == str(error):
                raise
            print(f"foreshock: {shown(sentence(error))}", file=sys.stderr)
            sys.exit(1)
