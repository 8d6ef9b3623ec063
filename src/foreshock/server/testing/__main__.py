"""`python -m foreshock.server.testing '{"metrics_seconds": 0.0}'`: serve with these constants of Settings changed."""

import json
import sys

from foreshock.server.__main__ import main
from foreshock.server.settings import Settings
from foreshock.server.testing.service import with_fixed

if __name__ == "__main__":
    sys.exit(main(with_fixed(Settings, **json.loads(sys.argv[1]))))
