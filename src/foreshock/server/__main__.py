"""`python -m foreshock.server`: run the service with the settings of the environment."""

import os
import signal
import sys
import threading

from foreshock.server import WITH_PARENT
from foreshock.server.app import AddressError, serve
from foreshock.server.settings import UnusableSettingsError, settings_of
from foreshock.server.store.database import StoreError


def main() -> int:
    """Run the service until SIGINT or SIGTERM, or, as a child, until its parent ends; return the exit status."""
    if WITH_PARENT in sys.argv[1:]:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        serve(settings_of(), ready=lambda sentence: print(sentence, flush=True))
    except (UnusableSettingsError, StoreError, AddressError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
