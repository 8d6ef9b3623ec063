"""`python -m foreshock.server`: serve with the settings of the environment."""

import sys

from foreshock.server.app import AddressError, serve
from foreshock.server.settings import UnusableSettingsError, settings_of
from foreshock.server.store.database import StoreError


def main() -> int:
    """Serve until SIGINT or SIGTERM; the exit status."""
    try:
        serve(settings_of(), ready=lambda sentence: print(sentence, flush=True))
    except (UnusableSettingsError, StoreError, AddressError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
