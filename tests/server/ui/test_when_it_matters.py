"""The page with a flood of warnings, with long names, with a fleet, and for people who may not act."""

from __future__ import annotations

import sqlite3
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import httpx
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from tests.server.ui.conftest import Feeder, Service
from tests.server.ui.reading import button, open_run, text, tile, wait

from foreshock.contract.wire import Finished, Verdict
from foreshock.server.settings import Token

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from selenium.webdriver import Chrome

pytestmark = pytest.mark.servers
LONG = "gpt-neox-20b/pile-deduplicated/bf16-flash-attention/lr-6e-4/warmup-3000/seed-1234567/80x64-"
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
    return Verdict.model_validate(
        {
            "id": f"offset-{layer}-{head}",
            "step": feeder.step,
            "state": "raised",
            "severity": "warning",
            "layer": layer,
            "head": head,
            "cause": "rounding",
            "signal": "offset",
            "evidence": {"offset": -6.25, "offset_before": -3.0, "score": 75.0, "tied_share": 0.1, "window_steps": 900},
            "forecast_steps": 2000.0 + 10 * head,
            "forecast_low_steps": 1500.0,
            "forecast_high_steps": 3000.0,
            "sentence": f"Layer {layer} head {head} drifts: its score offset left its peers and keeps growing.",
        }
        | fields
    )


def first_chart(chromium: Chrome) -> dict[str, float]:
    """Where the first chart stands on the page."""
    found: dict[str, float] = chromium.execute_script(
        "scrollTo(0, 0); return document.querySelector('.chart').getBoundingClientRect().toJSON()"
    )
    return found


@pytest.mark.full
def test_names_of_ninety_characters_break_no_card(screen: Chrome, service: Service, feeder: Feeder) -> None:
    names = [f"{LONG}{i}" for i in range(3)]
    for name in names:
        one = Feeder(service.client, name)
        one.start(labels={"experiment": "x" * 120})
        one.train(30)
        one.send(warn_about(one, 0, 2))
    for width in (1440, 390):
        see_at(screen, width, 4000)  # the page loads what can be seen
        for shown in (names, names[:1]):
            open_at_size(screen, service, *shown)
            assert screen.execute_script(OVERFLOW) == [], (width, len(shown))
        screen.get(service.url)
        wait("the list is drawn", lambda: screen.find_elements(By.CSS_SELECTOR, "tbody tr"))
        assert screen.execute_script(OVERFLOW) == [], (width, "list")


@pytest.mark.full
def test_a_warned_run_stays_on_the_list_however_many_runs_are_younger(chromium: Chrome, service: Service) -> None:
    warned = Feeder(service.client, "flood/warned")
    warned.start()
    warned.train(3)
    warned.warn()
    for i in range(150):
        Feeder(service.client, f"flood/{i:03}").start()
    chromium.get(service.url)
    wait("the warned run is on the list", lambda: chromium.find_elements(By.LINK_TEXT, "flood/warned"))
    assert len(chromium.find_elements(By.CSS_SELECTOR, "tbody tr")) == 100
    chromium.find_element(By.XPATH, "//button[starts-with(., 'Show ')]").click()
    wait("more are shown", lambda: len(chromium.find_elements(By.CSS_SELECTOR, "tbody tr")) > 150)
    chromium.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("flood/07")
    wait("the search finds ten", lambda: len(chromium.find_elements(By.CSS_SELECTOR, "tbody tr")) == 10)


@pytest.mark.full
def test_400_layers_of_128_heads_break_no_card(screen: Chrome, service: Service) -> None:
    feeder = Feeder(service.client, "wide/400x128", layers=400, heads=128)
    feeder.client = httpx.Client(base_url=service.url, timeout=120, trust_env=False)
    feeder.start()
    feeder.train(1)
    feeder.train(1)
    feeder.send(*(warn_about(feeder, 2 * i, i % 128) for i in range(200)))
    for width in (1440, 390):
        see_at(screen, width, 6000)
        open_at_size(screen, service, feeder.run)
        wait("the heat map", lambda: screen.find_elements(By.CSS_SELECTOR, ".heatmap .reading"))
        screen.execute_script("document.querySelectorAll('.warnings details').forEach((one) => (one.open = true))")
        wait("the heads are told", lambda: screen.find_elements(By.CSS_SELECTOR, ".warnings .layer"))
        assert screen.execute_script(OVERFLOW) == [], width
        cells = screen.execute_script("return document.querySelector('.heatmap canvas[tabindex]').height")
        assert cells > 400, "every layer has a row"
    feeder.client.close()


def test_the_axis_of_a_drift_is_the_one_that_the_catalogue_names(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start()
    feeder.train(60)
    open_run(chromium, service, feeder.run)
    pressed = {
        figure.find_element(By.TAG_NAME, "h3").text: figure.find_element(By.TAG_NAME, "button").get_attribute(
            "aria-pressed"
        )
        for figure in chromium.find_elements(By.CSS_SELECTOR, ".chart")
    }
    for metric in service.client.get("/v1/catalog").json()["metrics"]:
        if metric["chart"] == "first":
            assert pressed[metric["title"]] == str(metric["scale"] != "linear").lower(), metric["key"]
    wait("the heat map is drawn", lambda: "symmetric-log scale" in text(chromium, ".heatmap .scale"))


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


def test_many_warnings_at_one_step_are_one_marker_with_a_count(chromium: Chrome, service: Service) -> None:
    feeder = Feeder(service.client, "one-marker", layers=2, heads=48)
    feeder.start()
    feeder.train(40)
    feeder.send(*(warn_about(feeder, i // 48, i % 48) for i in range(96)))
    feeder.train(40)
    open_run(chromium, service, feeder.run)
    plot = chromium.find_element(By.CSS_SELECTOR, ".chart .u-over")
    half = plot.size["width"] // 2

    def caption() -> str:
        for shift in range(-6, 7, 2):
            ActionChains(chromium).move_to_element(plot).move_by_offset(shift, 0).perform()
            if "warnings" in (said := text(chromium, ".chart .at")):
                return said
        return ""

    assert half > 50
    assert "96 warnings" in wait("the marker is told in words", caption)


INKED = """
const canvas = document.querySelector(".chart canvas");
const pen = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
pen.drawImage(canvas, 0, 0);
const inked = (top, height) => {
  const { data } = pen.getImageData(0, top, canvas.width, height);
  return [...Array(canvas.width).keys()].filter((x) =>
    [...Array(height).keys()].some((y) => data[4 * (y * canvas.width + x) + 3] > 0));
};
return { width: canvas.width, markers: inked(0, 13), ticks: inked(canvas.height - 24, 24) };
"""


def test_the_last_tick_and_the_markers_of_the_newest_step_are_drawn_whole(chromium: Chrome, service: Service) -> None:
    runs = [Feeder(service.client, f"chart-end-{number}") for number in range(2)]
    for each in runs:
        each.start()
        each.train(60, every=10_000)
        each.warn()
    open_run(chromium, service, *(each.run for each in runs))
    drawn = wait("both markers, side by side", lambda: _drawn(chromium))
    assert max(drawn["markers"]) < drawn["width"] - 1
    assert max(drawn["ticks"]) < drawn["width"] - 1, "600k ends at the edge of the chart"


def _drawn(chromium: Chrome) -> dict[str, Any]:
    """Which columns of the first chart hold ink, once it has two markers of ten pixels each."""
    found: dict[str, Any] = chromium.execute_script(INKED)
    return found if len(found["markers"]) > 14 and found["ticks"] else {}


def test_a_name_with_an_x_between_digits_is_drawn_with_an_x(chromium: Chrome, service: Service) -> None:
    chromium.get(service.url)
    wait("the page is drawn", lambda: chromium.find_elements(By.TAG_NAME, "main"))
    whole, parts, multiplied = chromium.execute_async_script("""
      const done = arguments[0];
      (async () => {
        await document.fonts.load("100px Inter", "80x64");
        const width = (text) => {
          const span = document.createElement("span");
          span.style.fontSize = "100px";
          span.textContent = text;
          document.body.append(span);
          const found = span.getBoundingClientRect().width;
          span.remove();
          return found;
        };
        const around = width("80") + width("64");
        done([width("80x64"), around + width("x"), around + width("\u00d7")]);
      })();""")
    assert abs(parts - multiplied) > 5, "the font is not there"
    assert whole == pytest.approx(parts, abs=1)


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


def test_an_unknown_name_among_several_is_said_and_the_others_are_drawn(
    chromium: Chrome, service: Service, feeder: Feeder, complaints: Any
) -> None:
    feeder.start()
    feeder.train(30)
    chromium.get(f"{service.url}/?runs={feeder.run},no-such-run")
    wait("the other is drawn", lambda: chromium.find_elements(By.CSS_SELECTOR, ".chart .u-wrap"))
    assert "There is no run no-such-run" in text(chromium)
    assert all("404" in complaint for complaint in complaints())


def test_a_run_that_fell_silent_is_not_shown_as_active(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    feeder.start()
    feeder.train(5)
    store = service.environment["FORESHOCK_DATABASE_URL"].removeprefix("sqlite:///")
    with sqlite3.connect(store, timeout=20) as connection:
        connection.execute("UPDATE runs SET last_seen = last_seen - 3300 WHERE name = ?", (feeder.run,))
    connection.close()
    open_run(chromium, service, feeder.run)
    assert text(chromium, "header.title .state") == "silent 55 min"
    assert "active" not in str(chromium.find_element(By.CSS_SELECTOR, "header.title .state").get_attribute("class"))


def test_steps_left_says_when_the_limit_is_behind(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    feeder.start()
    feeder.train(5)
    feeder.send(warn_about(feeder, 0, 2, forecast_steps=0.0, forecast_low_steps=0.0, forecast_high_steps=0.0))
    open_run(chromium, service, feeder.run)
    assert tile(chromium, "Steps left") == "past the limit"
    assert "past the limit" in text(chromium, ".warnings")


@pytest.mark.full
def test_the_audit_trail_of_a_run_is_found_behind_those_of_others(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    def order(run: str, who: str) -> None:
        body = {"who": who, "reason": "a try", "mode": "exact_delta", "dry_run": True}
        service.client.post(f"/v1/runs/{run}/commands", json=body).raise_for_status()

    other = Feeder(service.client, f"{feeder.run}/other")
    for one in (feeder, other):
        one.start()
        one.train(3)
    order(feeder.run, "Ada")
    for _ in range(210):
        order(other.run, "Grace")
    open_run(chromium, service, feeder.run)
    chromium.find_element(By.XPATH, "//summary[.='Audit trail']").click()
    wait("the run's row is there", lambda: "Ada" in text(chromium, "section[aria-label=History] table"))
    assert "Grace" not in text(chromium, "section[aria-label=History] table")


def test_focus_comes_back_after_a_confirmation(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    feeder.start()
    feeder.train(5)
    open_run(chromium, service, feeder.run)
    button(chromium, "New order").click()
    chromium.find_element(By.NAME, "who").send_keys("Ada")
    chromium.find_element(By.NAME, "reason").send_keys("a try")
    button(chromium, "Continue").click()
    button(chromium, "Switch now").click()
    wait("the order stands", lambda: "a try" in text(chromium, ".commands"))
    wait("the focus is back", lambda: chromium.switch_to.active_element.text == "New order")
