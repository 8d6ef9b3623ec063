"""All models of the zoo, on several processes: `python -P tests/zoo RECORD [NAME...]`; run.py has the options."""

import sys
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # last: our kernels/ must not hide another package's

if __name__ == "__main__":
    raise SystemExit(import_module("tests.zoo.run").main(sys.argv[1:]))
