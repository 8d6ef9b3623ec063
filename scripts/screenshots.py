"""Saves the pictures of the live page that stand in README and docs: docs/images/*.png.

It fills a service of its own with the runs of the demo, a flood of warnings and a fleet.
"""

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from shutil import which
from typing import NamedTuple

import httpx
import numpy as np
from selenium.webdriver import Chrome
from selenium.webdriver.support.wait import WebDriverWait

sys.path.append(str(Path(__file__).parents[1]))  # last: our kernels/ must not stand before another package's

from tests.server.ui.conftest import Feeder, headless

from foreshock.contract.wire import Array, Event, Finished
from foreshock.lab.recording.replay import replay
from foreshock.lab.shown.story import NAMES, recordings
from foreshock.server.child import ServiceProcess
from foreshock.server.testing import FakeRank, post

ROOT = Path(__file__).resolve().parents[1]


READY = """
return !!document.querySelector(arguments[0]) &&
  ![...document.querySelectorAll('.empty')].some(e => e.textContent.toLowerCase().startsWith('loading'))
"""


class Picture(NamedTuple):
    """One file: what it shows, how wide and how high."""

    name: str
    runs: tuple[str, ...]
    width: int = 1440
    height: int = 900


FLOOD = "flood/12x12"
PICTURES = (Picture("demo", NAMES, 1280, 1500), Picture("fleet", ()), Picture("flood", (FLOOD,)))
"""The demo at its end, a fleet, and a run with 144 failing heads."""


def fill(url: str) -> None:
    """The runs that the pictures show."""
    replay(recordings(), url=url)
    with httpx.Client(base_url=url, timeout=120) as client:
        fill_fleet(client)
        fill_flood(client)


def fill_fleet(client: httpx.Client) -> None:
    """A thousand runs of one sample each, some warned about and some that have ended."""
    for number in range(1000):
        rank = FakeRank(run=f"fleet/{number:04}", layers=1, heads=(0,))
        step = 10 + 37 * number % 4001
        risk = Array.of(np.array([61 * number % 100 / 125], np.float32))
        events: list[Event] = [rank.sample(step, loss=2.2 + 37 * number % 100 / 100).model_copy(update={"risk": risk})]
        if number % 150 == 149:
            events.append(rank.verdict(step, 0, 0))
        elif number % 7 == 0:
            events.append(Finished(step=step, unix_seconds=float(step), status="completed"))
        post(client, rank.batch(rank.started(), *events)).raise_for_status()


def fill_flood(client: httpx.Client) -> None:
    """A run of 600,000 steps, of which one head of the first layer drifts; every head is warned about at its end."""
    rank = Feeder(client, FLOOD, layers=12, heads=12, drift=0.003)
    rank.start()
    rank.train(200, every=3000)
    heads = sorted(np.ndindex(12, 12), key=lambda place: place != (0, 2))
    rank.send(
        *(
            rank.verdict(rank.step, layer, head, name=f"warn-{number}", forecast_steps=2100.0 + 30 * number)
            for number, (layer, head) in enumerate(heads)
        )
    )


def take(browser: Chrome, url: str, picture: Picture, directory: Path) -> Path:
    """Photograph one picture; returns its file."""

    def screen(height: int) -> None:
        size = {"width": picture.width, "height": height, "deviceScaleFactor": 1.5, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    scheme = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    screen(8000)  # the page loads what can be seen
    browser.get(f"{url}/?runs={','.join(picture.runs)}" if picture.runs else url)
    expected = ".u-wrap" if picture.runs else "tbody tr"
    WebDriverWait(browser, 30).until(lambda _: browser.execute_script(READY, expected))
    time.sleep(1.0)  # what was loaded is drawn
    screen(picture.height)
    time.sleep(0.5)  # charts follow the new size
    file = directory / f"{picture.name}.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    assert browser.save_screenshot(str(file)), file
    return file


def main(out: Path = ROOT / "docs" / "images") -> None:
    """Photograph everything, and name the files."""
    with tempfile.TemporaryDirectory(prefix="foreshock-screenshots-") as directory, ExitStack() as stack:
        url = stack.enter_context(ServiceProcess(Path(directory))).url
        binary, driver = which("chromium"), which("chromedriver")
        if not binary or not driver:
            sys.exit("this needs Debian's packages chromium and chromium-driver: scripts/install-servers")
        browser = headless(binary, driver, Path(directory, "profile"))
        stack.callback(browser.quit)
        fill(url)
        for picture in PICTURES:
            print(take(browser, url, picture, out))


if __name__ == "__main__":
    main()
