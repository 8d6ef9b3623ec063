"""Runs public training code: `python -P scripts/run_real_code.py CLONES [NAME...]`; tests/real_code/run.py says how."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # last: our kernels/ must not stand before another package's

from tests.real_code.run import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
