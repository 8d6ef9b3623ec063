"""Load time of a large run's page in Chromium: `foreshock bench page`.

The run has 1,000,000 steps of 80 layers x 64 heads. The browser measures the time from the start of the navigation to
the frame after the last chart. Browser and service share the CPU cores.
"""

import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, Final

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service as Chromedriver
from selenium.webdriver.support.ui import WebDriverWait

from foreshock.benchmarks import machine
from foreshock.benchmarks.ingest import UNLIMITED
from foreshock.benchmarks.service import send_long_run
from foreshock.server.testing import LiveService

_FLAGS: Final = (
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "no-proxy-server",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "disable-dev-shm-usage",
    "force-device-scale-factor=1",
)
WINDOW: Final = 1280, 4000
"""Window size in pixels, large enough for the whole page, because charts outside the window are not loaded."""
_WATCH: Final = """
const look = () => {
  const heads = document.querySelector("section[aria-label='Layer by head'] .stack:not(.blank) canvas");
  const drawn = heads && document.querySelector(".chart canvas");
  const waits = [...document.querySelectorAll(".chart p")].some((one) => one.textContent === "loading");
  if (drawn && !waits) requestAnimationFrame(() => (window.drawnAt = performance.now()));
  else requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""


def headless(binary: str, driver: str, profile: Path) -> Chrome:
    """Start Chromium in headless mode with a new profile."""
    options = ChromeOptions()
    options.binary_location = binary
    for flag in (*_FLAGS, f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return Chrome(options=options, service=Chromedriver(driver))


def main(json_path: Path | None = None, *, repeats: int = 7) -> dict[str, Any]:
    """Measure, print the results, write them as JSON, and return them. Raises RuntimeError if Chromium is missing."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        raise RuntimeError("needs chromium and chromedriver on the PATH; install them")
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveService(Path(folder), run_batches_per_second=UNLIMITED) as service,
        service.client(timeout=120.0) as client,
    ):
        send_long_run(client, Path(folder) / "foreshock.db")
        chrome = headless(binary, driver, Path(folder) / "profile")
        try:
            chrome.set_window_size(*WINDOW)
            chrome.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH})
            opened = [_opened(chrome, service) for _ in range(repeats)]
        finally:
            chrome.quit()
    report = machine.header("foreshock bench page --json FILE") | {
        "window": WINDOW,
        "seconds_to_last_chart": {"least": min(opened), "median": median(opened), "opened": opened},
    }
    return machine.written(report, json_path)


def _opened(chrome: Chrome, service: LiveService) -> float:
    """Open the page once, and return the seconds until its last chart."""
    chrome.get("about:blank")
    chrome.get(f"{service.url}/?runs=wide")
    return float(WebDriverWait(chrome, 120).until(lambda one: one.execute_script("return window.drawnAt"))) / 1000
