"""Runs tests that are no part of pytest: `python -P scripts/run_tests_of.py zoo RECORD` (tests/zoo/run.py)."""

import sys
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # last: our kernels/ must not hide another package's

if __name__ == "__main__":
    raise SystemExit(import_module(f"tests.{sys.argv[1]}.run").main(sys.argv[2:]))
