"""Count the words to avoid in pages and in the code, and fail if a count rises."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
EXEMPT = frozenset(
    {
        "CHANGELOG.md",  # has one line for each change, of any length
        "src/foreshock/lab/NOTEBOOK.md",  # a record of experiments, which is not edited
        "scripts/check_prose.py",
    }
)
AVOIDED: Final = re.compile(
    r"\b(anew|beside|shall|stands|lies|told|whoever|mend(?:s|ed|ing)?|under way|by itself|alone)\b", re.IGNORECASE
)
AT_MOST: Final = {".md": 1, ".py": 25}
"""Lower these counts when you rewrite text."""


def main() -> int:
    """Return 1, and print the files with words to avoid, if there are more of them than AT_MOST."""
    command = ["git", "ls-files", "--", "*.md", "*.py", ":!tests"]
    listed = set(subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split()) - EXEMPT
    risen = 0
    for kind, most in AT_MOST.items():
        files = (name for name in listed if name.endswith(kind))
        found = Counter({name: len(AVOIDED.findall((ROOT / name).read_text())) for name in files})
        if found.total() > most:
            print(f"{kind}: {found.total()} words to avoid, at most {most}: {found.most_common(20)}", file=sys.stderr)
            risen = 1
    return risen


if __name__ == "__main__":
    sys.exit(main())
