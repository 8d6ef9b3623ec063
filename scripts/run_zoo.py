"""Runs the zoo: `python -P scripts/run_zoo.py RECORD [--processes 3] [NAME...]`; tests/zoo/run.py says what it does."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # last: our kernels/ must not stand before another package's

from tests.zoo.run import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
