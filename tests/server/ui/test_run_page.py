"""The page of a run in a real Chromium with a real service: live updates, warnings, switches and its URL."""

from __future__ import annotations

import re
import sqlite3
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from tests.server.ui.conftest import Service
from tests.server.ui.page_driver import MINUS, button, fill, open_run, text, tile, wait

from foreshock.benchmarks.service import send_long_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from selenium.webdriver import Chrome
    from tests.server.ui.conftest import Feeder
pytestmark = pytest.mark.servers
DRAWN = ".stack:not(.blank) "
"""The heat map once it has values; before, it only takes its room."""


@pytest.mark.full
def test_run_appears_warns_is_switched_verified_and_undone(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    chromium.get(service.url)
    wait("the stream is open", lambda: text(chromium, ".connection") == "live")

    feeder.start()
    feeder.train(5)
    row = wait("the run appears in the list", lambda: chromium.find_element(By.LINK_TEXT, feeder.run))
    row.click()
    wait("the page of the run opens", lambda: tile(chromium, "Step") == "50")
    feeder.train(60)
    wait("the step is updated", lambda: tile(chromium, "Step") == "650")
    assert "No active warning" in text(chromium)

    feeder.warn()
    wait("the warning is shown", lambda: "its score offset left its peers" in text(chromium, ".warnings"))
    assert "about 2,100 (not before 1,400)" in text(chromium, ".warnings")
    assert f"{MINUS}6.25" in text(chromium, ".evidence")
    assert tile(chromium, "Steps left") == "about 2,100"

    button(chromium, "Switch this head").click()
    fill(chromium, who="Ada", reason="the offset grows")
    button(chromium, "Continue").click()
    sentence = f"Switch layer 0 head 2 of {feeder.run} to row_corrected."
    wait("the dialog describes the order before it is sent", lambda: sentence in text(chromium, "dialog"))
    assert not feeder.obey()
    button(chromium, "Switch now").click()
    wait("the order is listed", lambda: "the offset grows" in text(chromium, ".commands"))
    assert feeder.obey() == ["row_corrected"]
    wait("the order is applied", lambda: "applied" in text(chromium, ".commands .state"))
    feeder.train(3)
    wait("the mode is shown", lambda: tile(chromium, "Switched heads").startswith("1 of 8"))
    wait("the history lists it", lambda: "row_corrected is applied" in text(chromium, ".events"))

    feeder.train(40)
    verified = "growth stopped"
    wait("the switch is verified", lambda: verified in text(chromium, ".commands .verification"))
    wait("the history lists the verification", lambda: "verified, the growth has stopped" in text(chromium, ".events"))

    button(chromium, "Undo").click()
    fill(chromium, reason="enough seen")
    button(chromium, "Continue").click()
    sentence = f"Undo: switch layer 0 head 2 to row_corrected in {feeder.run}."
    wait("the dialog describes the undo before it is sent", lambda: sentence in text(chromium, "dialog"))
    button(chromium, "Undo now").click()
    wait("the undo is listed", lambda: "undo: enough seen" in text(chromium, ".commands"))
    assert feeder.obey() == ["plain"]
    feeder.train(1)
    wait("the mode is plain again", lambda: tile(chromium, "Switched heads") == "none")
    wait("the switch is marked as undone", lambda: "undone" in text(chromium, ".commands li:nth-child(2)"))
    assert not chromium.find_elements(By.XPATH, "//button[.='Undo']"), "an undone switch must not offer Undo"

    chromium.find_element(By.XPATH, "//summary[.='Audit trail']").click()
    wait("the audit trail names who and why", lambda: "Ada" in text(chromium, "section[aria-label=History] table"))


@pytest.mark.full
def test_page_reports_lost_connection_and_catches_up_after_reconnect(
    chromium: Chrome, service: Service, feeder: Feeder, complaints: Callable[[], list[str]]
) -> None:
    feeder.start()
    feeder.train(5)
    open_run(chromium, service, feeder.run)
    wait("the stream is open", lambda: text(chromium, ".connection") == "live")
    canvas = wait("the heat map is shown", lambda: chromium.find_element(By.CSS_SELECTOR, DRAWN + "canvas[tabindex]"))
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    service.stop()
    wait("the page reports the lost connection", lambda: "connection lost" in text(chromium, ".connection"))
    service.start()
    feeder.train(20)
    feeder.warn()
    wait("the page is live again", lambda: text(chromium, ".connection") == "live")
    wait("the missed warning is shown", lambda: "its score offset left its peers" in text(chromium, ".warnings"))
    wait("the missed steps are shown", lambda: tile(chromium, "Step") == "250")
    assert "layer 1 head 3" in text(chromium, ".reading"), "the selected head was lost with the connection"
    errors = complaints()  # messages of the browser itself, which a page cannot prevent
    # While the service stops, it answers 503; afterwards connections fail.
    assert all("ERR_" in line or "status of 503" in line for line in errors), errors


def query_of(chromium: Chrome) -> dict[str, list[str]]:
    """The query of the current URL."""
    return parse_qs(urlsplit(chromium.current_url).query)


def test_url_selects_head_metric_and_steps_and_follows_user_choices(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start()
    feeder.train(60)
    # the link of an alert, see tests/dashboards/test_alert_texts.py
    query = {"runs": feeder.run, "head": "1.3", "metric": "head.query_norm", "steps": "200-"}
    chromium.get(f"{service.url}/?{urlencode(query)}")
    wait("the charts show the head", lambda: "layer 1 head 3" in text(chromium, ".chart .legend"))
    assert text(chromium, ".chart h3") == "Spectral norm of W_Q", "the requested metric must be the first chart"
    plot = wait("the chart is drawn", lambda: chromium.find_element(By.CSS_SELECTOR, ".chart .plot:has(.u-wrap)"))
    plot.send_keys(Keys.HOME)
    wait("the chart begins at the requested step", lambda: text(chromium, ".chart .at") in ("step 200", "step 300"))
    assert button(chromium, "Show all steps")
    measure = Select(wait("the heat map is shown", lambda: chromium.find_element(By.CSS_SELECTOR, ".pick select")))
    assert measure.first_selected_option.get_attribute("value") == "head.query_norm"
    assert query_of(chromium) == {name: [value] for name, value in query.items()}, (
        "the URL must not change without a choice"
    )

    measure.select_by_value("head.score_offset")
    canvas = wait("the cells are shown", lambda: chromium.find_element(By.CSS_SELECTOR, DRAWN + "canvas[tabindex]"))
    canvas.send_keys(Keys.ARROW_LEFT, Keys.ARROW_UP)
    button(chromium, "Show all steps").click()
    chosen = {"runs": [feeder.run], "head": ["0.2"], "metric": ["head.score_offset"]}
    wait("the URL contains the choices", lambda: query_of(chromium) == chosen)
    chromium.get(chromium.current_url)
    wait("the reloaded page shows the head", lambda: "layer 0 head 2" in text(chromium, ".chart .legend"))
    assert not chromium.find_elements(By.XPATH, "//button[.='Show all steps']")

    scrubber = wait("the heat map is shown", lambda: chromium.find_element(By.CSS_SELECTOR, DRAWN + ".scrub input"))
    scrubber.send_keys(Keys.HOME)
    wait("the first step is shown", lambda: text(chromium, ".scrub output") == "10")
    wait(
        "the value of the first step is shown",
        lambda: text(chromium, ".reading").startswith(f"layer 0 head 2: {MINUS}1."),
    )
    scrubber.send_keys(Keys.END)
    last = f"layer 0 head 2: {MINUS}6.9", f"layer 0 head 2: {MINUS}7"
    wait("the last step is shown", lambda: text(chromium, ".reading").startswith(last))


def test_chart_says_not_recorded_in_a_gap_without_samples(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    feeder.start()
    feeder.train(40)
    feeder.step += 4000  # a service that was down for longer than the agent's spool lasts
    feeder.train(40)
    open_run(chromium, service, feeder.run)
    chromium.find_element(By.CSS_SELECTOR, ".chart .plot").send_keys(Keys.HOME, Keys.PAGE_DOWN, Keys.PAGE_DOWN)
    wait("the cursor is in the gap", lambda: text(chromium, ".chart .at") == "step 410")
    assert text(chromium, ".chart .legend output") == "not recorded"


def test_legend_shows_no_value_of_other_steps(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    feeder.start()
    feeder.train(40)
    open_run(chromium, service, feeder.run)
    legend = ".chart .legend output"
    wait("the legend has a value", lambda: text(chromium, legend))
    go = "history.pushState({}, '', arguments[0]); dispatchEvent(new PopStateEvent('popstate'))"
    chromium.execute_script(go, f"/?{urlencode({'runs': feeder.run, 'steps': '5000-6000'})}")
    wait("the chart has nothing to draw", lambda: text(chromium, ".chart .plot") == "not recorded")
    assert not text(chromium, legend)


def test_unrecorded_metrics_are_labelled_and_silent_run_is_not_active(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.recorded = frozenset({"states"})
    feeder.start()
    feeder.train(20)
    with sqlite3.connect(service.folder / "foreshock.db", timeout=20) as connection:
        connection.execute("UPDATE runs SET last_seen = last_seen - 3300 WHERE name = ?", (feeder.run,))
        days_ago = "UPDATE events SET unix_seconds = 1795000000 WHERE run_id = (SELECT id FROM runs WHERE name = ?)"
        connection.execute(days_ago, (feeder.run,))
    connection.close()
    open_run(chromium, service, feeder.run)
    assert text(chromium, "header.title .state") == "silent 55 min"
    assert re.fullmatch(r"11-1[789] \d\d:\d\d", text(chromium, ".events time")), (
        "an event of another day lacks its date"
    )
    assert "active" not in str(chromium.find_element(By.CSS_SELECTOR, "header.title .state").get_attribute("class"))
    assert [tile(chromium, name) for name in ("Loss", "Risk")] == ["not recorded"] * 2
    charts = {
        chart.find_element(By.TAG_NAME, "h3").text: chart.text
        for chart in chromium.find_elements(By.CSS_SELECTOR, ".chart")
    }
    for title in ("Loss", "Gradient norm", "Risk", "Spectral norm of W_Q"):
        assert "not recorded" in charts[title]
    assert "not recorded" not in charts["Score offset"]


@pytest.mark.full
def test_page_of_million_step_run_loads_few_megabytes_in_few_requests(
    chromium: Chrome, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    service = Service(tmp_path)
    try:
        send_long_run(service.client, tmp_path / "foreshock.db")
        open_run(chromium, service, "wide")
        drawn = chromium.execute_script("return performance.now()")
        requests = chromium.execute_script("return performance.getEntriesByType('resource').map(one => one.toJSON())")
        paint = chromium.execute_script("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
        record_property("first paint, milliseconds", round(paint))
        record_property("all charts drawn, milliseconds", round(drawn))
        record_property("requests", len(requests))
        record_property("bytes", received := sum(one["encodedBodySize"] for one in requests))
        assert tile(chromium, "Step") == "1,000,384"
        assert len(requests) < 24
        assert received < 4 * 2**20
    finally:
        chromium.get("about:blank")
        service.close()
