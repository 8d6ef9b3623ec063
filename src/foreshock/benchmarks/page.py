"""The page of a run of 1,000,000 steps of 80 layers x 64 heads in a real Chromium. `foreshock bench page`.

The time is the browser's own, from the start of the navigation to the frame after the last chart. Browser and service
share the machine's cores.
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
from foreshock.benchmarks.ingest import UNLIMITED, cpu_seconds, written
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
"""Pixels; it shows the whole page, which loads only what can be seen."""
_WATCH: Final = """
const look = () => {
  const heads = document.querySelector("section[aria-label='Layer by head'] canvas");
  const drawn = heads && document.querySelector(".chart canvas");
  const waits = [...document.querySelectorAll(".chart p")].some((one) => one.textContent === "loading");
  if (drawn && !waits) requestAnimationFrame(() => (window.drawnAt = performance.now()));
  else requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
_FOUND: Final = """
const loads = performance.getEntriesByType("resource");
return {
  first_paint: performance.getEntriesByName("first-contentful-paint")[0].startTime / 1000,
  last_chart: window.drawnAt / 1000,
  charts: document.querySelectorAll(".chart canvas").length,
  requests: loads.length,
  bytes: loads.reduce((sum, one) => sum + one.encodedBodySize, 0),
  curves: loads.filter((one) => one.name.includes("/curves")).map((one) => [one.startTime / 1000, one.duration / 1000]),
};
"""


def headless(binary: str, driver: str, profile: Path) -> Chrome:
    """A Chromium without a window, with a fresh profile."""
    options = ChromeOptions()
    options.binary_location = binary
    for flag in (*_FLAGS, f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return Chrome(options=options, service=Chromedriver(driver))


def main(json_path: Path | None = None, *, repeats: int = 7) -> dict[str, Any]:
    """Measure, print and write JSON; the figures. Raises RuntimeError without a Chromium and its driver."""
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
            chrome.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
            opened = [_opened(chrome, service) for _ in range(repeats)]
        finally:
            chrome.quit()
    best = min(opened, key=lambda one: one["last_chart"])
    report = machine.header("foreshock bench page --json FILE") | {
        "window": WINDOW,
        "seconds_to_last_chart": {"least": best["last_chart"], "median": median(one["last_chart"] for one in opened)},
        "fastest": best,
        "opened": opened,
    }
    return written(report, json_path)


def _opened(chrome: Chrome, service: LiveService) -> dict[str, Any]:
    """What it takes to open the page once; seconds."""
    chrome.get("about:blank")
    before = cpu_seconds(service), _main_thread(chrome)
    chrome.get(f"{service.url}/?runs=wide")
    WebDriverWait(chrome, 120).until(lambda one: one.execute_script("return window.drawnAt"))
    cpu = cpu_seconds(service) - before[0], _main_thread(chrome) - before[1]
    found: dict[str, Any] = chrome.execute_script(_FOUND)
    return found | {"service_cpu": round(cpu[0], 3), "main_thread_cpu": round(cpu[1], 3)}


def _main_thread(chrome: Chrome) -> float:
    """Processor seconds that the page's main thread has taken so far."""
    metrics = chrome.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))
