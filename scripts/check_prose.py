"""Says which sentences of the pages that people read are longer than 35 words."""

import re
import sys
from pathlib import Path

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
        "src/foreshock/lab/NOTEBOOK.md",  # kept as it was written
        "docs/reliability.md",  # test names and figures, generated
        "docs/models.md",  # test names and reasons, generated
    }
)
UP_TO = {"src/foreshock/kernels/flash_attention/README.md": "\n## Dropout"}
"""Where the checked part of a page ends: what follows is a notebook of measurements."""
MOST_WORDS = 35


def pages() -> list[str]:
    """Every page of FOLDERS that is not exempt; a new page is checked from its first line on."""
    found = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
    return [name for page in found if (name := page.relative_to(ROOT).as_posix()) not in EXEMPT]


def sentences(text: str) -> list[str]:
    """The sentences of a page: without code, tables' rules and headings; each cell and list entry by itself."""
    text = re.sub(r"^```.*?^```$", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "Code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\.) ?)|\|", text):
        flat = " ".join(block.replace("*", "").lstrip("#-0123456789. \n").split())
        found += re.split(r"(?<=[.!?:;])\s+(?=[A-Z(])", flat)
    return [sentence for sentence in found if sentence]


def too_long(text: str) -> list[str]:
    """The sentences of more than MOST_WORDS words."""
    return [sentence for sentence in sentences(text) if len(sentence.split()) > MOST_WORDS]


def main() -> int:
    """Print what is wrong; the number of findings, at most 1, is the exit code."""
    wrong = [
        f"{page}: {len(sentence.split())} words: {sentence}"
        for page in pages()
        for sentence in too_long((ROOT / page).read_text().split(UP_TO.get(page, "\0"))[0])
    ]
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
