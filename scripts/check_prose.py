"""Counts the words to avoid in pages, and in the strings and comments of the code: a count may not rise."""

import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    ".",
    "docs",
    "docs/runbooks",
    "docs/reference",
    *map("src/foreshock/{}".format, ("lab", "lab/traces", "kernels/flash_attention", "server/ui")),
)
EXEMPT = frozenset(
    {
        "CHANGELOG.md",  # one line for each change, however long
        "src/foreshock/lab/NOTEBOOK.md",  # a record of experiments, unchanged
    }
)
AVOIDED: Final = re.compile(
    r"\b(anew|beside|shall|stands|lies|told|whoever|mend(?:s|ed|ing)?|under way|by itself|alone)\b", re.IGNORECASE
)
CODE: Final = ("src/foreshock", "scripts", "examples")
AT_MOST: Final = {"pages": 25, "code": 315}
"""Lower these counts when you rewrite text."""


def pages() -> list[str]:
    """Every page of FOLDERS that is not exempt; a new page is checked from its first line on."""
    found = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
    return [name for page in found if (name := page.relative_to(ROOT).as_posix()) not in EXEMPT]


def texts() -> Iterator[tuple[str, str, str]]:
    """Where each text counts, its file and its words: pages, and strings and comments of the code."""
    for page in pages():
        yield "pages", page, (ROOT / page).read_text()
    kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for file in sorted(file for folder in CODE for file in (ROOT / folder).rglob("*.py")):
        if file != Path(__file__).resolve():
            tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
            yield "code", file.relative_to(ROOT).as_posix(), "\n".join(t.string for t in tokens if t.type in kinds)


def main() -> int:
    """Print where words to avoid are if there are more of them than before; 1 in that case."""
    counts: dict[str, Counter[str]] = {"pages": Counter(), "code": Counter()}
    for where, file, text in texts():
        counts[where][file] += len(AVOIDED.findall(text))
    risen = {where: found for where, found in counts.items() if found.total() > AT_MOST[where]}
    for where, found in risen.items():
        print(
            f"{where}: {found.total()} words to avoid, at most {AT_MOST[where]}: {found.most_common(20)}",
            file=sys.stderr,
        )
    return int(bool(risen))


if __name__ == "__main__":
    sys.exit(main())
