"""The documentation's site in a browser: what is cut at the right of a page is not read. It stands with the browser."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from selenium.webdriver import Chrome

ROOT: Final = Path(__file__).parents[3]
WIDER: Final = """
return [...document.querySelectorAll("article table, article pre")].filter(element => element.matches("table")
  ? element.offsetWidth > element.parentElement.clientWidth : element.scrollWidth > element.clientWidth
).map(element => element.textContent.trim().slice(0, 60))"""
"""The beginnings of tables and blocks that are wider than their box, so that a reader would have to scroll."""


@pytest.mark.full
def test_no_table_and_no_block_of_a_page_is_wider_than_its_box(tmp_path: Path, chromium: Chrome) -> None:
    site = tmp_path / "site"
    sphinx = [sys.executable, "-P", "-m", "sphinx", "--quiet", "--doctree-dir", f"{tmp_path}/trees", "docs", f"{site}"]
    subprocess.run(sphinx, cwd=ROOT, check=True)
    assert (site / "reference/settings.html").is_file()
    chromium.set_window_size(1280, 900)
    wider = {}
    for page in site.rglob("*.html"):
        chromium.get(page.as_uri())
        if found := chromium.execute_script(WIDER):
            wider[page.name] = found
    assert not wider
