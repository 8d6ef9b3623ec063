"""Error handling of all commands: one sentence on standard error and a non-zero exit code."""

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
    """An error that ends a command; its message is shown to the user."""


def sentence(error: Exception) -> str:
    """Return the message for the user about an error of configuration or input, or a missing extra."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        extra = _EXTRAS.get(error.name.partition(".")[0])
        if extra:
            how = f"pip install '.[{extra}]' in foreshock's clone"
            return f"this command needs {error.name}, which is not installed: {how}"
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename} cannot be used: {error.strerror}"
    return str(error)


class Commands(TyperGroup):
    """A command group that reports errors which the user can fix as one sentence instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command and report its errors."""
        try:
            done = super().invoke(ctx)
            sys.stdout.flush()  # flush here, so that a closed pipe is handled below
            return done
        except BrokenPipeError:  # the reader closed the pipe, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the flush at exit does not fail as well
            sys.exit(0)
        except (CommandError, ServiceError, ModuleNotFoundError, ValueError, OSError) as error:
            if isinstance(error, ModuleNotFoundError) and sentence(error) == str(error):
                raise
            print(f"foreshock: {shown(sentence(error))}", file=sys.stderr)
            sys.exit(1)
