"""How quick the live page is with runs of 600,000 steps: queries, first paint, scrubbing; with 1,000 runs: listing and
searching. `foreshock bench page`.

A real service, filled as agents fill it, and a real Chromium share the machine's cores. Needs Debian's packages
chromium and chromium-driver, and selenium.
"""

import json
import os
import platform
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from shutil import which
from statistics import median
from typing import Any, Final

import httpx
from rich import box
from rich.console import Console
from rich.table import Table
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service as Chromedriver

from foreshock.benchmarks.browser import page_fleet
from foreshock.benchmarks.browser.page_runs import DEEP, STEPS, WIDE, LongRun
from foreshock.server.curves.rollups import COARSE
from foreshock.server.testing import LiveService

REPEATS: Final = 7
_WINDOWS: Final = {"window of 1280 x 900": 900, "all charts and the heat map, 1280 x 3600": 3600}
_ROLLED_UP_SECONDS: Final = 300.0
_WATCH: Final = """
const loading = (e) => {
  const {top, bottom, height} = e.getBoundingClientRect();
  return height && bottom > 0 && top < innerHeight && e.textContent.toLowerCase().startsWith("loading");
};
const look = () => {
  const drawn = document.querySelector(".chart .u-wrap") && ![...document.querySelectorAll(".empty")].some(loading);
  if (drawn) requestAnimationFrame(() => { window.paintedSeconds = performance.now() / 1000; });
  else requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
_SCRUB: Final = """
const done = arguments[0], input = document.querySelector(".scrub input"), frames = 120;
const times = [];
const turn = (now) => {
  times.push(now);
  if (times.length > frames) {
    const took = times.slice(1).map((t, i) => t - times[i]).sort((a, b) => a - b);
    return done([1000 * frames / (times.at(-1) - times[0]), took[Math.floor(0.95 * took.length)] / 1000]);
  }
  input.value = (7 * times.length) % (Number(input.max) + 1);
  input.dispatchEvent(new Event("input", {bubbles: true}));
  requestAnimationFrame(turn);
};
requestAnimationFrame(turn);
"""


def main(json_path: Path | None = None, *, folder: Path | None = None, fleet: bool = False) -> dict[str, Any]:
    """Measure, print a table, write JSON; the figures. `folder` keeps the filled store for another time.

    fleet: only the list of 1,000 runs; the other figures of the JSON that is there stay.
    """
    command = "foreshock bench page" + (" --fleet" if fleet else "") + " --json FILE"
    report: dict[str, Any] = {}
    if fleet and json_path is not None and json_path.exists():
        report = json.loads(json_path.read_text())
    with ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foreshock-page-")))
        place.mkdir(parents=True, exist_ok=True)
        service = stack.enter_context(LiveService(place, {"FORESHOCK_RUN_BATCHES_PER_SECOND": "1e9"}))
        client = stack.enter_context(service.client(timeout=120.0))
        long_runs = () if fleet else (DEEP, WIDE)
        for run in long_runs:
            fill(client, run, place)
        if long_runs:
            report = _device(command)
            report["runs"] = {
                run.name: {
                    "steps": STEPS,
                    "samples": STEPS // run.every,
                    "layers": run.layers,
                    "heads": run.heads,
                    **queries(client, run),
                }
                for run in long_runs
            }
        with chromium() as browser:
            if long_runs:
                report["chromium"] = browser.capabilities["browserVersion"]
            for run in long_runs:
                report["runs"][run.name] |= _page(browser, service.url, run)
            page_fleet.fill(client)
            about = _device(command) | {"chromium": browser.capabilities["browserVersion"]}
            report["fleet"] = about | page_fleet.measure(browser, service.url, REPEATS)
    console = Console(width=max(110, Console().width))
    if long_runs:
        console.print(_table(report))
    found = report["fleet"]
    took = (f"{what} in {found[f'{what}_seconds']['median']:.2f} s" for what in ("listed", "searched"))
    console.print(f"{found['runs']:,} runs: {', '.join(took)}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


def _device(command: str) -> dict[str, Any]:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": {
            "cpu": models[0].partition(": ")[2] if models else platform.machine(),
            "cores": os.cpu_count(),
            "load_at_start": round(os.getloadavg()[0], 2),
        },
        "versions": {"foreshock": version("foreshock"), "python": platform.python_version()},
    }


def fill(client: httpx.Client, run: LongRun, folder: Path) -> None:
    """Send the run unless the store has it, and wait until it is rolled up."""
    if client.get(f"/v1/runs/{run.name}").status_code == 404:
        run.send(client)
    client.get(f"/v1/runs/{run.name}/series", params={"metric": "run.loss"}).raise_for_status()  # rolls up what is not
    count = "SELECT count(*) FROM rollup_spans JOIN runs ON runs.id = run_id WHERE name = ?"
    deadline = time.monotonic() + _ROLLED_UP_SECONDS
    while True:
        with closing(sqlite3.connect(f"file:{folder / 'foreshock.db'}?mode=ro", uri=True)) as store:
            if store.execute(count, (run.name,)).fetchone()[0] > STEPS // COARSE - 1:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run.name} was not rolled up within {_ROLLED_UP_SECONDS:g} s")
        time.sleep(0.5)


def _seconds(client: httpx.Client, path: str, **query: Any) -> dict[str, Any]:
    """Median and slowest of some answers, and their size."""
    took, size = [], 0
    for _ in range(REPEATS):
        began = time.perf_counter()
        answer = client.get(path, params=query).raise_for_status()
        took.append(time.perf_counter() - began)
        size = len(answer.content)
    return {"median_seconds": round(median(took), 4), "slowest_seconds": round(max(took), 4), "bytes": size}


def page_lines(run: LongRun) -> list[str]:
    """What the page asks for when it opens: eight charts, of one head and of the worst heads of four layers."""
    whole = ["run.loss", "run.grad_norm"]
    names = ("score_offset", "score_max", "tied_rows_bf16", "delta_bias", "query_norm", "risk")
    places = [f"0:{run.heads // 2}", "0", "3", "6", "9"]
    return whole + [f"head.{name}:{place}" for name in names for place in places]


def queries(client: httpx.Client, run: LongRun) -> dict[str, Any]:
    at = f"/v1/runs/{run.name}"
    points = {"max_points": 600}
    return {
        "query_seconds": {
            "loss": _seconds(client, f"{at}/series", metric="run.loss", **points),
            "one head": _seconds(
                client, f"{at}/series", metric="head.score_max", layer=0, head=run.heads // 2, **points
            ),
            "worst head of every layer": _seconds(client, f"{at}/series", metric="head.score_max", **points),
            "every curve of the page": _seconds(client, f"{at}/curves", line=page_lines(run), **points),
            "head matrix at a step": _seconds(
                client, f"{at}/matrix", metric="head.score_max", step=STEPS // 3, max_steps=0
            ),
            "head matrix and its steps": _seconds(client, f"{at}/matrix", metric="head.score_max", max_steps=120),
        }
    }


def _page(browser: Chrome, url: str, run: LongRun) -> dict[str, Any]:
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH})
    painted: dict[str, Any] = {}
    for window, height in _WINDOWS.items():
        browser.set_window_size(1280, height)
        took = []
        for _ in range(REPEATS):
            browser.get(f"{url}/?runs={run.name}")
            took.append(_painted(browser))
            browser.get("about:blank")
        painted[window] = {"median": round(median(took), 3), "slowest": round(max(took), 3)}
    browser.get(f"{url}/?runs={run.name}")
    _painted(browser)
    time.sleep(3.0)  # frames of the heat map that are not on the screen load meanwhile
    per_second, slow = browser.execute_async_script(_SCRUB)
    return {
        "first_paint_seconds": painted,
        "heat_map_frames_per_second": round(per_second, 1),
        "heat_map_frame_p95_seconds": round(slow, 4),
    }


def _painted(browser: Chrome, seconds: float = 60.0) -> float:
    """Seconds from the start of the navigation until everything in the window is drawn."""
    deadline = time.monotonic() + seconds
    while (found := browser.execute_script("return window.paintedSeconds")) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{browser.current_url} was not drawn within {seconds:g} s")
        time.sleep(0.2)
    return float(found)


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


def _table(report: dict[str, Any]) -> Table:
    machine = report["device"]
    title = f"Page: {machine['cpu']}, {machine['cores']} cores, load {machine['load_at_start']}; {STEPS:,} steps"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("")
    for name, figures in report["runs"].items():
        table.add_column(
            f"{name}: {figures['layers']} x {figures['heads']}, {figures['samples']:,} samples", justify="right"
        )
    deep, wide = report["runs"].values()
    for query in deep["query_seconds"]:
        cells = (f"{1e3 * figures['query_seconds'][query]['median_seconds']:.0f} ms" for figures in (deep, wide))
        table.add_row(query, *cells)
    for window in _WINDOWS:
        cells = (f"{figures['first_paint_seconds'][window]['median']:.2f} s" for figures in (deep, wide))
        table.add_row(f"first paint, {window}", *cells)
    table.add_row("heat map", *(f"{figures['heat_map_frames_per_second']:.0f} frames/s" for figures in (deep, wide)))
    return table
