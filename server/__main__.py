"""`python -m foreshock.server`: serve with the settings of the environment."""

import sys

from pydantic import ValidationError

from foreshock.server.app import serve
from foreshock.server.settings import Settings
from foreshock.server.store.database import StoreError


def main() -> int:
    """Serve until told to stop; the exit status."""
    try:
        serve(Settings(), ready=lambda sentence: print(sentence, flush=True))
    except ValidationError as error:
        for problem in error.errors(include_input=False, include_url=False):
            where = ".".join(map(str, problem["loc"]))
            print(f"FORESHOCK_{where.upper()}: {problem['msg']}" if where else problem["msg"], file=sys.stderr)
        return 2
    except StoreError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
