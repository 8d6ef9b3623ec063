"""A temporary service with a live page for a demo."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from foreshock.contract.incident import page_of
from foreshock.server.child import ServiceProcess


@contextmanager
def own_page(console: Console, port: int, *runs: str) -> Iterator[str]:
    """In a with block, run a temporary service and give its address; its page then stays up until Enter is pressed.

    Raises OSError if the service does not start.
    """
    with (
        tempfile.TemporaryDirectory(prefix="foreshock-") as folder,
        ServiceProcess(Path(folder), {"FORESHOCK_PORT": str(port)}) as service,
    ):
        page = page_of(service.url, *runs)
        console.print(f"Live page: [link={page}]{page}[/link]\n", soft_wrap=True)
        yield service.url
        if console.is_terminal and sys.stdin.isatty():
            console.input("\nThe live page stays up until you press Enter. ")
