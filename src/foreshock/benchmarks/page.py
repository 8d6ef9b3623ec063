"""How quick the list of runs is with a fleet of 1,000: listed and searched. `foreshock bench page`.

A real service, filled as agents fill it, and a real Chromium share the machine's cores. Needs Debian's packages
chromium and chromium-driver, and selenium.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from statistics import median
from typing import Any, Final

import httpx
import numpy as np
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service as Chromedriver

from foreshock.benchmarks.ingest import here
from foreshock.contract.wire import Array, Event, Finished
from foreshock.server.testing import FakeRank, LiveService

RUNS: Final = 1000
REPEATS: Final = 7
PREFIX: Final = "fleet/"
_LISTED: Final = """
const done = arguments[0];
const look = () => document.querySelector("tbody .run")
  ? requestAnimationFrame(() => done(performance.now() / 1000))
  : requestAnimationFrame(look);
look();
"""
_SEARCHED: Final = """
const [words, name, done] = arguments, field = document.querySelector("input[type=search]"), began = performance.now();
field.value = words;
field.dispatchEvent(new Event("input", { bubbles: true }));
const look = () => {
  const found = [...document.querySelectorAll("tbody .run [title]")].map((run) => run.title);
  if (found.length === 1 && found[0] === name) requestAnimationFrame(() => done((performance.now() - began) / 1000));
  else requestAnimationFrame(look);
};
look();
"""


def main(json_path: Path | None = None) -> dict[str, Any]:
    """Measure, print a line, write JSON; the figures. Other figures of a JSON file that is there stay."""
    with (
        tempfile.TemporaryDirectory(prefix="foreshock-page-") as place,
        LiveService(Path(place), {"FORESHOCK_RUN_BATCHES_PER_SECOND": "1e9"}) as service,
        service.client(timeout=120.0) as client,
        chromium() as browser,
    ):
        fill(client)
        about = here("foreshock bench page --json FILE") | {"chromium": browser.capabilities["browserVersion"]}
        found = about | measure(browser, service.url)
    took = (f"{what} in {found[f'{what}_seconds']['median']:.2f} s" for what in ("listed", "searched"))
    print(f"{found['runs']:,} runs: {', '.join(took)}")
    if json_path is not None:
        kept = json.loads(json_path.read_text()) if json_path.exists() else {}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(kept | {"fleet": found}, indent=2) + "\n")
    return found


def fill(client: httpx.Client, runs: int = RUNS) -> None:
    """Send so many runs of one sample each, some warned about and some that have ended, unless the store has them."""
    answer = client.get("/v1/runs", params={"search": f"{PREFIX}{runs - 1:04}"}).raise_for_status()
    if answer.json()["runs"]:
        return
    for number in range(runs):
        rank = FakeRank(run=f"{PREFIX}{number:04}", layers=1, heads=(0,))
        step = 10 + 37 * number % 4001
        risk = Array.of(np.array([61 * number % 100 / 125], np.float32))
        told: list[Event] = [rank.sample(step, loss=2.2 + 37 * number % 100 / 100).model_copy(update={"risk": risk})]
        if number % 150 == 149:
            told.append(rank.verdict(step, 0, 0))
        elif number % 7 == 0:
            told.append(Finished(step=step, unix_seconds=float(step), status="completed"))
        batch = rank.batch(rank.started(), *told).model_dump_json()
        client.post("/v1/batches", content=batch, headers={"content-type": "application/json"}).raise_for_status()


def measure(browser: Chrome, url: str, repeats: int = REPEATS, runs: int = RUNS) -> dict[str, Any]:
    """Seconds from the start of the navigation until the list is drawn, and from a search until its run alone is."""
    browser.set_window_size(1280, 900)
    listed, searched = [], []
    for turn in range(repeats):
        browser.get(f"{url}/?sort=name")
        listed.append(float(browser.execute_async_script(_LISTED)))
        name = f"{PREFIX}{(7 * turn + 3) % runs:04}"
        searched.append(float(browser.execute_async_script(_SEARCHED, name[1:], name)))
        browser.get("about:blank")
    return {
        "runs": runs,
        "listed_seconds": {"median": round(median(listed), 3), "slowest": round(max(listed), 3)},
        "searched_seconds": {"median": round(median(searched), 3), "slowest": round(max(searched), 3)},
    }


@contextmanager
def chromium() -> Iterator[Chrome]:
    """A headless Chromium with a fresh profile. Raises FileNotFoundError where there is none."""
    binary, driver = which("chromium"), which("chromedriver")
    if not binary or not driver:
        raise FileNotFoundError("this needs Debian's packages chromium and chromium-driver: scripts/install-servers")
    with tempfile.TemporaryDirectory(prefix="foreshock-chromium-") as profile:
        options = ChromeOptions()
        options.binary_location = binary
        for flag in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "no-proxy-server"):
            options.add_argument(f"--{flag}")
        for flag in ("disable-background-networking", "disable-component-update", "disable-sync", "hide-scrollbars"):
            options.add_argument(f"--{flag}")
        options.add_argument(f"--user-data-dir={profile}")
        browser = Chrome(options=options, service=Chromedriver(driver))
        try:
            yield browser
        finally:
            browser.quit()
