"""Runs a foreshock command in this process and returns its exit code and output."""

from pathlib import Path

from typer.testing import CliRunner, Result

from foreshock.cli.main import app

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "src/foreshock/lab" / "traces" / "key-bias_fp32_batch32.trace.xz"


def foreshock(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))
