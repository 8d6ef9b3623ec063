"""The page with a flood of warnings, with long names, with a fleet, and for people who may not act."""

from __future__ import annotations

import sqlite3
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
from selenium.webdriver.common.by import By
from tests.server.ui.conftest import Feeder, Service
from tests.server.ui.reading import button, open_run, text, wait

from foreshock.contract.wire import Finished, Verdict
from foreshock.server.settings import Token

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from selenium.webdriver import Chrome

pytestmark = pytest.mark.servers
OVERFLOW = """
const wide = [];
for (const card of document.querySelectorAll(".card, main > section, dialog")) {
  const { left, right } = card.getBoundingClientRect();
  for (const inner of card.querySelectorAll("*:not(.hidden)")) {
    if (inner.closest(".table, .canvas, .u-wrap, .scroll")) continue;
    const room = inner.getBoundingClientRect();
    if (room.width && (room.right > right + 1 || room.left < left - 1))
      wide.push(`${inner.tagName}.${inner.className} in ${card.className}: ${inner.textContent.slice(0, 40)}`);
  }
}
for (const word of document.querySelectorAll(".crumbs a, .state, button")) {
  const range = document.createRange();
  range.selectNodeContents(word);
  if (range.getBoundingClientRect().height > 50) wide.push(`broken into letters: ${word.textContent}`);
}
for (const dialog of document.querySelectorAll("dialog")) {
  const { left, right, top, bottom } = dialog.getBoundingClientRect();
  if (left < 0 || right > innerWidth || top < 0 || bottom > innerHeight) wide.push("a dialog leaves the screen");
}
if (document.documentElement.scrollWidth > innerWidth) wide.push(`the page: ${document.documentElement.scrollWidth}`);
return wide;
"""


def see_at(chromium: Chrome, width: int, height: int) -> None:
    """Give the page exactly this room."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


@pytest.fixture
def screen(chromium: Chrome) -> Iterator[Chrome]:
    """The browser, whose room is its window's again afterwards."""
    yield chromium
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def open_at_size(chromium: Chrome, service: Service, *runs: str) -> None:
    """Open the page of these runs in a window that shows the first charts alone."""
    chromium.get(f"{service.url}/?{urlencode({'runs': ','.join(runs)})}")
    wait("a chart is drawn", lambda: chromium.find_elements(By.CSS_SELECTOR, ".chart .u-wrap"))


def warn_about(feeder: Feeder, layer: int, head: int, **fields: Any) -> Verdict:
    said: dict[str, Any] = {
        "name": f"offset-{layer}-{head}",
        "evidence": {"offset": -6.25, "offset_before": -3.0, "score": 75.0, "tied_share": 0.1, "window_steps": 900},
        "forecast_steps": 2000.0 + 10 * head,
        "forecast_low_steps": 1500.0,
        "sentence": f"Layer {layer} head {head} drifts: its score offset left its peers and keeps growing.",
    }
    return feeder.verdict(feeder.step, layer, head, **said | fields)


def first_chart(chromium: Chrome) -> dict[str, float]:
    """Where the first chart stands on the page."""
    found: dict[str, float] = chromium.execute_script(
        "scrollTo(0, 0); return document.querySelector('.chart').getBoundingClientRect().toJSON()"
    )
    return found


@pytest.mark.full
@pytest.mark.parametrize("warnings", [3, 144])
def test_the_first_chart_is_on_the_screen_however_many_warnings_there_are(
    screen: Chrome, service: Service, warnings: int
) -> None:
    feeder = Feeder(service.client, f"first-chart-{warnings}", layers=3, heads=48)
    feeder.start(labels={"model": "gpt-768", "corpus": "text"})
    feeder.train(40)
    feeder.send(*(warn_about(feeder, i // 48, i % 48) for i in range(warnings)))
    see_at(screen, 1440, 900)
    open_at_size(screen, service, feeder.run)
    assert first_chart(screen)["bottom"] <= 900
    screen.execute_script("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    wait("the heads are told", lambda: screen.find_elements(By.CSS_SELECTOR, ".warnings .layer"))
    charts = "return document.getElementById('signals').getBoundingClientRect().top + scrollY"
    assert screen.execute_script(charts) < 1400


def test_a_finished_run_offers_no_approval(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    feeder.start(policy="approve")
    feeder.train(5)
    feeder.warn()
    feeder.propose()
    open_run(chromium, service, feeder.run)
    wait("it offers approval while it runs", lambda: button(chromium, "Approve"))
    feeder.send(Finished(step=feeder.step, unix_seconds=time.time(), status="completed"))
    wait("the run has ended", lambda: "completed" in text(chromium, "header.title .state"))
    assert not chromium.find_elements(By.XPATH, "//button[.='Approve' or .='Switch this head']")
    assert "The run has ended" in text(chromium, "section[aria-label=Approvals]")


@pytest.mark.full
def test_people_who_may_only_read_see_no_switch_and_everybody_can_log_out(
    chromium: Chrome, tmp_path: Path, complaints: Any
) -> None:
    reader = Token.of("watcher", "watcher-of-many-runs", ("read",))
    service = Service(tmp_path, token="agent-and-operator", tokens=f"[{reader.model_dump_json()}]")
    try:
        feeder = Feeder(service.client, "guarded")
        feeder.start()
        feeder.train(5)
        feeder.warn()
        switches = "//button[starts-with(., 'Switch') or .='New order']"
        for secret, found in (("watcher-of-many-runs", False), ("agent-and-operator", True)):
            chromium.get(f"{service.url}/?runs=guarded")
            wait("it asks for a token", lambda: chromium.find_element(By.NAME, "token")).send_keys(secret)
            button(chromium, "Enter").click()
            wait("the warning is there", lambda: "its score offset left" in text(chromium, ".warnings"))
            assert bool(chromium.find_elements(By.XPATH, switches)) == found
            button(chromium, "Log out").click()
            wait("it asks for a token again", lambda: chromium.find_element(By.NAME, "token"))
        chromium.get("about:blank")  # a page whose service has gone would complain
    finally:
        service.close()
    assert all("401" in complaint for complaint in complaints())  # of what was asked when the session ended


def test_a_run_that_fell_silent_is_not_shown_as_active(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    feeder.start()
    feeder.train(5)
    with sqlite3.connect(service.folder / "foreshock.db", timeout=20) as connection:
        connection.execute("UPDATE runs SET last_seen = last_seen - 3300 WHERE name = ?", (feeder.run,))
    connection.close()
    open_run(chromium, service, feeder.run)
    assert text(chromium, "header.title .state") == "silent 55 min"
    assert "active" not in str(chromium.find_element(By.CSS_SELECTOR, "header.title .state").get_attribute("class"))
