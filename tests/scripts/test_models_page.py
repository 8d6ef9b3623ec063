"""docs/models.md says what the marks of the tests and the zoo's records say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_models_is_what_the_tests_and_the_records_say() -> None:
    """In a process of its own: it collects tests."""
    command = [sys.executable, "-P", str(ROOT / "scripts" / "models_page.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
