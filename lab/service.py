"""The service as a child process, for runs that bring their own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def local_service(directory: Path, port: int) -> Iterator[str]:
    """Serve on loopback with a store under `directory`; yields the address. Port 0 takes a free one.

    Raises OSError with the service's own words when it does not start.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FORESHOCK_")}
    environment |= {"FORESHOCK_PORT": str(port), "FORESHOCK_DATABASE_URL": f"sqlite:///{directory / 'foreshock.db'}"}
    command = [sys.executable, "-P", "-m", "foreshock.server"]
    with (directory / "service.log").open("w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"https?://\S+?:\d+", said)
            if found is None:
                process.wait(timeout=10)
                log.seek(0)
                raise OSError(f"the service did not start on port {port}: {(said + log.read()).strip()[-500:]}")
            yield found.group()
        finally:
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
