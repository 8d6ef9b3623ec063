"""The documentation site: `make site` writes it to build/site, which opens without a network.

Sphinx with MyST and Furo: of the three that were looked at (with MkDocs Material, whose MkDocs had no release since
2024, and Zensical, which is at version 0.1) the one whose every part is kept and whose strict mode checks every link.
"""

import re
from pathlib import Path
from typing import Any

from foreshock import __version__

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "src/foreshock/lab/README.md": "laboratory.md",
    "src/foreshock/kernels/flash_attention/README.md": "kernels.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages that lie elsewhere in the repository, and the page of the site that includes each."""

project = "foreshock"
author = "the foreshock authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = "foreshock"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
default_role = "code"
myst_heading_anchors = 4
myst_links_external_new_tab = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
suppress_warnings = ["myst.header", "misc.highlighting_failure", "toc.empty_glob"]
"""Headings may skip a level, and a block of a terminal is no language. A page that no list leads to stops the build."""

_TABLE = re.compile(r"<table.*?</table>", re.DOTALL)
_TEXT = re.compile(r"(?<=>)[^<]+")
_JOINT = re.compile(r"(?<=[\w/][_./:=+-])(?=[A-Za-z])|(?<=[a-z]{2})(?=[A-Z][a-z])")
"""Where a name in a table may break: a browser keeps FORESHOCK_REPLACE_WRONG_ATTENTION whole, wider than the page."""
_LINK = re.compile(r"(?P<before>\]\()(?P<path>(?!https?:|#)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def _follow(home: Path, text: str) -> str:
    """Links of a page that lies at `home`, as they are to be on the site.

    Links to pages of the site are followed; what the site does not hold becomes its path in the repository. A link to
    what is not there at all is left, and stops the build.
    """

    def target(match: re.Match[str]) -> str:
        path = (home.parent / match["path"]).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            return match[0]
        inside = path.relative_to(ROOT).as_posix()
        if inside in PAGES and (ROOT / inside).exists():
            return f"](/{PAGES[inside]}{match['anchor'] or ''})"
        if inside.startswith("docs/") and path.is_file():
            return f"](/{inside.removeprefix('docs/')}{match['anchor'] or ''})"
        return f"](https://repository.invalid/{inside})"

    text = _LINK.sub(target, text)
    # what lies in the repository alone is named, not linked: the site has no address of the repository
    return re.sub(r"\[([^\]]*)\]\(https://repository\.invalid/([^)]*)\)", r"\1 (`\2`)", text)


def _read(app: Any, name: str, content: list[str]) -> None:
    """Put a page of the repository into its place, and let every link lead to where the site has it."""
    elsewhere = {page.removesuffix(".md"): path for path, page in PAGES.items()}
    home = ROOT / elsewhere[name] if name in elsewhere else ROOT / "docs" / f"{name}.md"
    content[0] = _follow(home, home.read_text())
    if name == "index":  # a page that nobody listed is a how-to
        listed = set(re.findall(r"^[\w/-]+$", content[0], re.MULTILINE)) | {"index"}
        others = sorted({page.stem for page in (ROOT / "docs").glob("*.md")} - listed)
        content[0] = content[0].replace("\nothers\n", "".join(f"\n{page}" for page in others) + "\n")


def _breakable(_app: Any, _page: str, _template: str, context: dict[str, Any], _tree: Any) -> None:
    """Let long names in tables break at their joints; what is copied from there is as it was."""

    def broken(table: re.Match[str]) -> str:
        return _TEXT.sub(lambda text: _JOINT.sub("<wbr>", text[0]), table[0])

    context["body"] = _TABLE.sub(broken, context.get("body", ""))


def _outdated(*_: Any) -> list[str]:
    """The pages whose text lies elsewhere are read at each build: Sphinx looks at the age of its own files alone."""
    return [page.removesuffix(".md") for page in PAGES.values()]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("env-get-outdated", _outdated)
    app.connect("html-page-context", _breakable)
