"""Photographs every generated board in a live Grafana: scripts/grafana_pictures.py URL USER PASSWORD_FILE FOLDER.

`scripts/compose-smoke --screenshots FOLDER` calls it. It logs in as the page does, and waits until no panel loads.
"""

import json
import sys
from pathlib import Path

import httpx
from selenium.webdriver.support.ui import WebDriverWait

from foreshock.benchmarks.page import chromium

ROOT = Path(__file__).resolve().parents[1]
BOARDS = ROOT / "src/foreshock/dashboards" / "generated" / "boards"
SECONDS = 60


def main(url: str, user: str, password_file: str, folder: Path) -> None:
    """One PNG for each board. Raises httpx.HTTPStatusError when the login is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    with httpx.Client(base_url=url) as client:
        login = {"user": user, "password": Path(password_file).read_text().strip()}
        client.post("/login", json=login).raise_for_status()
        cookies = dict(client.cookies)
    with chromium() as browser:
        browser.set_window_size(1440, 1800)
        browser.get(f"{url}/login")  # a cookie is set where its own pages are
        for name, value in cookies.items():
            browser.add_cookie({"name": name, "value": value})
        for board in sorted(BOARDS.glob("*.json")):
            browser.get(f"{url}/d/{json.loads(board.read_text())['uid']}?kiosk")
            loaded = "return document.querySelectorAll('[data-testid*=\"Panel header\"]').length > 0 && "
            loaded += "!document.querySelector('[aria-label=\"Panel loading bar\"]')"
            WebDriverWait(browser, SECONDS).until(lambda b, script=loaded: b.execute_script(script))
            browser.save_screenshot(str(folder / f"{board.stem}.png"))
            print(folder / f"{board.stem}.png")


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
