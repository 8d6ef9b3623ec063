"""Runs all models of the zoo in several processes: `python -P tests/zoo RECORD [NAME...]`. Options: see run.py."""

import sys
from importlib import import_module
from pathlib import Path

# Last, so that this repository's kernels/ does not shadow another package.
sys.path.append(str(Path(__file__).parents[2]))

if __name__ == "__main__":
    raise SystemExit(import_module("tests.zoo.run").main(sys.argv[1:]))
