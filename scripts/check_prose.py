"""Says which sentences of README and Start are longer than 30 words, and whether README has more than 120 lines."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/index.md", "docs/quickstart.md", "docs/glossary.md")
MOST_WORDS, MOST_LINES = 30, 120


def sentences(text: str) -> list[str]:
    """The sentences of a page: without code, tables' rules and headings; each cell and list entry by itself."""
    text = re.sub(r"^```.*?^```$", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "code", text)
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
        for page in PAGES
        for sentence in too_long((ROOT / page).read_text())
    ]
    lines = len((ROOT / "README.md").read_text().splitlines())
    if lines > MOST_LINES:
        wrong.append(f"README.md has {lines} lines; at most {MOST_LINES}")
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
