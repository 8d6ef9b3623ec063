"""Layout and accessibility of every view and dialog, with names of maximum length."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlencode

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from tests.e2e.running import absent
from tests.server.ui.conftest import Feeder, Service
from tests.server.ui.page_driver import fill, listed, open_list, wait, warn_about

from foreshock.contract.modes import DEFAULT_MITIGATION, parse_mode
from foreshock.contract.wire import Finished, Switched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium.webdriver import Chrome

pytestmark = pytest.mark.servers
UI = Path(__file__).parents[3] / "src/foreshock/server" / "ui"
OVERFLOW = Path(__file__).with_name("overflow.js").read_text()
LONG = "sweep/" + "w" * 116
"""A run name of maximum length without a place to break the line; WHO and REASON are as long as allowed, too."""
WHO, REASON = "n" * 128, "<b>" + "r" * 497
HEADS: Final = ((0, 2), *((layer, head) for layer in range(3) for head in range(12) if (layer, head) != (0, 2)))[:30]
LABELS = {
    "note": "x" * 200,
    "direction": "נסיון תجربة " * 12,
    "markup": "<img src=x onerror=alert(1)>" + "<table><b>" * 16,
    "n" * 100: "short",
}


class Dialog(NamedTuple):
    """A dialog: the button that opens it, and whether it asks for a name, a reason and a confirmation."""

    press: str
    confirmed: bool = True


DIALOGS: Final = (
    Dialog("New order"),
    Dialog("Approve"),
    Dialog("Reject"),
    Dialog("Stop"),
    Dialog("Undo"),
    Dialog("Name and notes", confirmed=False),
)
UNFOLDED: Final = {
    "30 heads in 3 layers, fewest steps left first": "section[aria-label=Warnings]",
    "Acknowledge": "section[aria-label=Warnings]",
    "Audit trail": "section[aria-label=History]",
}


@pytest.fixture(scope="module")
def run(service: Service) -> str:
    """A training run with 30 warned heads, a proposal, an applied and an open order; and a run that has ended."""
    client = service.client
    feeder = Feeder(client, LONG, layers=3, heads=12)
    feeder.start(labels=LABELS, policy="approve")
    feeder.train(60)
    first, *others = (
        feeder.verdict(600, *ref, name="w-{}-{}".format(*ref), sentence=f"{ref} drifts " + "w" * 200) for ref in HEADS
    )
    feeder.send(first, *others)
    order: dict[str, Any] = {"who": WHO, "reason": REASON, "mode": DEFAULT_MITIGATION}
    client.post(f"/v1/runs/{LONG}/commands", json={**order, "heads": [[1, 3]]}).raise_for_status()
    feeder.obey()
    proposal = {"outcome": "proposed", "heads": HEADS, "before": ("plain",) * len(HEADS), "reason": REASON}
    after = (DEFAULT_MITIGATION,) * len(HEADS)
    feeder.send(Switched.model_validate({**proposal, "id": "p", "step": 610, "verdict": first.id, "after": after}))
    client.post(f"/v1/runs/{LONG}/commands", json={**order, "heads": [[2, 1]]}).raise_for_status()
    description = {"who": WHO, "display_name": LONG, "tags": ["keep", "seed study"], "notes": REASON}
    client.patch(f"/v1/runs/{LONG}", json=description).raise_for_status()
    ended = Feeder(client, f"{LONG}-ended", layers=1, heads=3)
    ended.start()
    ended.train(1)
    ended.send(Finished(step=10, unix_seconds=7.0, status="completed"))
    return LONG


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, in the version of package.json."""
    path = UI / "node_modules" / "axe-core" / "axe.min.js"
    if not path.is_file():
        version = json.loads((UI / "package.json").read_text())["devDependencies"]["axe-core"]
        folder = tmp_path_factory.mktemp("axe")
        if shutil.which("npm") is None:
            absent("npm")
        fetch = ["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", f"axe-core@{version}"]
        installed = subprocess.run(fetch, capture_output=True, text=True, timeout=240)
        if installed.returncode:
            absent(f"axe-core, which npm could not fetch: {installed.stderr[-500:]},")
        path = folder / "node_modules" / "axe-core" / "axe.min.js"
    return path.read_text()


def accessibility_violations(chromium: Chrome, axe: str, part: str = "html") -> list[str]:
    """Violations that axe-core finds in this part of the page."""
    chromium.execute_script(axe)
    chromium.set_script_timeout(60)
    found: list[dict[str, Any]] = chromium.execute_async_script(
        "const done = arguments[arguments.length - 1]; axe.run(arguments[0]).then(r => done(r.violations))",
        part,
    )
    return [f"{v['id']}: {v['help']}: {[node['html'][:160] for node in v['nodes'][:3]]}" for v in found]


@pytest.fixture
def screen(chromium: Chrome) -> Iterator[Chrome]:
    """The browser; its viewport and theme are reset after the test."""
    yield chromium
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def set_viewport(chromium: Chrome, width: int, height: int = 900) -> None:
    """Set the size of the viewport."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def open_at_size(chromium: Chrome, service: Service, *runs: str) -> None:
    """Open the page of these runs at the current size and wait for the first chart."""
    chromium.get(f"{service.url}/?{urlencode({'runs': ','.join(runs)})}")
    wait("a chart is drawn", lambda: chromium.find_elements(By.CSS_SELECTOR, ".chart .u-wrap"))


def press(chromium: Chrome, within: str, text: str) -> None:
    """Press the first button or summary with this text."""
    found = f"{within}//*[self::button or self::summary][normalize-space()='{text}']"
    pressed = wait(text, lambda: chromium.find_element(By.XPATH, found))
    chromium.execute_script("arguments[0].scrollIntoView({ block: 'center' })", pressed)  # not covered by the top bar
    pressed.click()


def views(chromium: Chrome, service: Service, run: str, guarded: Service, width: int) -> Iterator[tuple[str, str]]:
    """Open each view in turn and yield (name, selector). No order is sent, and no run is changed or deleted."""
    set_viewport(chromium, width, 6000)  # the page loads only visible charts
    open_list(chromium, service, q=LONG[:20])
    wait("both runs are listed", lambda: len(listed(chromium)) == 2)
    yield "the list of runs", "html"
    open_at_size(chromium, service, run, f"{run}-ended")
    yield "a comparison", "html"
    for name, dialogs in ((f"{run}-ended", (Dialog("Delete"),)), (run, DIALOGS)):
        set_viewport(chromium, width, 6000)
        open_at_size(chromium, service, name)
        wait("the history has loaded", lambda: chromium.find_element(By.CSS_SELECTOR, ".events li:not(.empty)"))
        yield name, "html"
        set_viewport(chromium, width)
        for dialog in dialogs:
            press(chromium, "//main", dialog.press)
            wait("the dialog", lambda: chromium.find_element(By.CSS_SELECTOR, "dialog[open] form"))
            yield dialog.press, "dialog"
            if dialog.confirmed:
                fill(chromium, who=WHO, reason=REASON)
                press(chromium, "//dialog", "Continue")
                wait("the confirmation", lambda: chromium.find_element(By.CSS_SELECTOR, "dialog .confirm"))
                yield f"{dialog.press}, confirmed", "dialog"
            chromium.switch_to.active_element.send_keys(Keys.ESCAPE)
            wait("the dialog is closed", lambda: not chromium.find_elements(By.TAG_NAME, "dialog"))
    for summary, part in UNFOLDED.items():
        press(chromium, "//main", summary)
        wait(
            "the unfolded part has loaded",
            lambda: chromium.find_elements(By.CSS_SELECTOR, ".warnings .layer, .warnings form, table"),
        )
        chromium.execute_script("document.querySelectorAll('.warnings .layer').forEach((one) => (one.open = true))")
        yield summary, part
    chromium.get(guarded.url)
    wait("the login", lambda: chromium.find_elements(By.CSS_SELECTOR, "input[type=password]"))
    yield "the login", "html"
    chromium.get("about:blank")  # leave the page before its service stops


@pytest.mark.full
@pytest.mark.parametrize(("width", "theme"), [(1440, "dark"), (390, "light")])
def test_every_view_and_dialog_fits_and_passes_accessibility_checks(
    screen: Chrome, service: Service, guarded: Service, run: str, axe: str, width: int, theme: str
) -> None:
    media = [{"name": "prefers-color-scheme", "value": theme}]
    screen.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    checked, problems = [], []
    for name, part in views(screen, service, run, guarded, width):
        checked.append(name)
        problems += [
            f"{name}: {problem}"
            for problem in screen.execute_script(OVERFLOW) + accessibility_violations(screen, axe, part)
        ]
    assert not problems, "\n".join(problems)
    dialogs = [Dialog("Delete"), *DIALOGS]
    assert len(checked) == 5 + len(UNFOLDED) + len(dialogs) + sum(dialog.confirmed for dialog in dialogs)


@pytest.mark.full
@pytest.mark.parametrize("warnings", [3, 144])
def test_first_chart_is_visible_with_many_warnings(screen: Chrome, service: Service, warnings: int) -> None:
    feeder = Feeder(service.client, f"first-chart-{warnings}", layers=3, heads=48)
    feeder.start(labels={"model": "gpt-768", "corpus": "text"})
    feeder.train(40)
    feeder.send(*(warn_about(feeder, i // 48, i % 48) for i in range(warnings)))
    set_viewport(screen, 1440)
    open_at_size(screen, service, feeder.run)
    bottom = "scrollTo(0, 0); return document.querySelector('.chart').getBoundingClientRect().bottom"
    assert screen.execute_script(bottom) <= 900
    screen.execute_script("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    wait("the warned heads are listed", lambda: screen.find_elements(By.CSS_SELECTOR, ".warnings .layer"))
    charts = "return document.getElementById('signals').getBoundingClientRect().top + scrollY"
    assert screen.execute_script(charts) < 1400


@pytest.mark.parametrize(("width", "room"), [(1024, 120), (390, 300)])
def test_two_compared_runs_have_readable_names_and_fit_a_telephone(
    screen: Chrome, service: Service, width: int, room: int
) -> None:
    for name in ("compared-a", "compared-b"):
        feeder = Feeder(service.client, name)
        feeder.start()
        feeder.train(1)
        feeder.modes[:] = [[parse_mode("row_corrected")], [parse_mode("paper_softmax")]]  # a long line of names
        feeder.train(1)
    set_viewport(screen, width)
    open_at_size(screen, service, "compared-a", "compared-b")
    table = "const t = document.querySelector('.table'); return [t.scrollWidth - t.clientWidth, "
    wider, name = screen.execute_script(table + "t.querySelector('.name').getBoundingClientRect().width]")
    assert name > room, "the name has no room for a word"
    assert width > 390 or wider == 0, "the table is wider than the telephone"


SHIFTS = """
window.shifted = 0;
new PerformanceObserver((seen) => seen.getEntries().forEach((one) => (window.shifted += one.value)))
  .observe({ type: "layout-shift", buffered: true });
const below = document.querySelector("section[aria-label=History]");
below.scrollIntoView({ block: "end" });
window.places = [];
const look = () => {
  window.places.push(below.getBoundingClientRect().top + scrollY);
  requestAnimationFrame(look);
};
look();
"""


@pytest.mark.parametrize("width", [1440, 390])
def test_layout_is_stable_while_charts_and_heat_map_load(screen: Chrome, service: Service, width: int) -> None:
    feeder = Feeder(service.client, f"still-{width}", layers=12, heads=12)
    feeder.start()
    feeder.train(40)
    slow = {"offline": False, "latency": 400, "downloadThroughput": -1, "uploadThroughput": -1}
    screen.execute_cdp_cmd("Network.enable", {})
    set_viewport(screen, width)
    try:
        screen.execute_cdp_cmd("Network.emulateNetworkConditions", slow)
        screen.get(f"{service.url}/?runs={feeder.run}")
        wait("the page", lambda: screen.find_elements(By.CSS_SELECTOR, "section[aria-label=History]"))
        screen.execute_script(SHIFTS)
        wait("its values", lambda: "layer 0 head 2: " in screen.find_element(By.CSS_SELECTOR, ".reading").text)
        screen.execute_script("scrollTo(0, 0)")
        wait("the charts", lambda: len(screen.find_elements(By.CSS_SELECTOR, ".charts .u-wrap")) > 1)
        shifted, places = screen.execute_script("return [window.shifted, window.places]")
        Select(screen.find_element(By.CSS_SELECTOR, ".pick select")).select_by_value("head.query_norm")
        assert screen.find_element(By.CSS_SELECTOR, ".stack .empty").text == "Loading the values."
    finally:
        screen.execute_cdp_cmd("Network.disable", {})
    assert shifted < 0.1
    assert max(places) - min(places) < 80, "the sections below the charts moved"
