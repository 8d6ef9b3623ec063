"""`python -m foreshock.server.testing '{"metrics_seconds": 0.0}'`: run it with changed constants of Settings."""

import json
import sys

from foreshock.server.__main__ import main
from foreshock.server.settings import Settings

if __name__ == "__main__":
    for name, value in json.loads(sys.argv[1]).items():
        setattr(Settings, name, value)
    sys.exit(main())
