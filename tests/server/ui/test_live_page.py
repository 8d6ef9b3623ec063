"""The live page in a real Chromium, fed by a real service: a run appears, moves, warns, is switched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tests.server.ui.reading import MINUS, button, open_run, text, tile, wait

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from tests.server.ui.conftest import Feeder, Service
pytestmark = pytest.mark.servers


@pytest.mark.full
def test_a_run_appears_moves_warns_and_is_switched(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    chromium.get(service.url)
    wait("the stream is open", lambda: text(chromium, ".connection") == "live")

    feeder.start()
    feeder.train(5)
    row = wait("the run appears in the list", lambda: chromium.find_element(By.LINK_TEXT, feeder.run))
    row.click()
    wait("its page opens", lambda: tile(chromium, "Step") == "50")
    feeder.train(60)
    wait("it moves", lambda: tile(chromium, "Step") == "650")
    assert "No active warning" in text(chromium)

    feeder.warn()  # how fast it travels is measured by test_how_fast_a_warning_travels.py
    wait("it warns", lambda: "its score offset left its peers" in text(chromium, ".warnings"))
    assert "about 2,100 (not before 1,400)" in text(chromium, ".warnings")
    assert f"{MINUS}6.25" in text(chromium, ".evidence")
    assert tile(chromium, "Steps left") == "about 2,100"

    button(chromium, "Switch this head").click()
    chromium.find_element(By.NAME, "who").send_keys("Ada")
    chromium.find_element(By.NAME, "reason").send_keys("the offset grows")
    button(chromium, "Continue").click()
    sentence = f"Switch layer 0 head 2 of {feeder.run} to row_corrected."
    wait("the order is said in words before it goes", lambda: sentence in text(chromium, "dialog"))
    assert not feeder.obey()
    button(chromium, "Switch now").click()
    wait("the order stands on the page", lambda: "the offset grows" in text(chromium, ".commands"))
    assert feeder.obey() == ["row_corrected"]
    wait("the agent's answer stands on the page", lambda: "applied" in text(chromium, ".commands .state"))
    feeder.train(3)
    wait("the mode is shown", lambda: tile(chromium, "Switched heads").startswith("1 of 8"))
    wait("it is told in the history", lambda: "row_corrected is applied" in text(chromium, ".events"))

    feeder.train(40)
    verified = "growth stopped"
    wait("it is verified", lambda: verified in text(chromium, ".commands .verification"))
    wait("in words", lambda: "verified, the growth has stopped" in text(chromium, ".events"))

    button(chromium, "Undo").click()
    chromium.find_element(By.NAME, "reason").send_keys("enough seen")
    button(chromium, "Continue").click()
    sentence = f"Undo the switch of layer 0 head 2 of {feeder.run} to row_corrected"
    wait("what is undone is said before it goes", lambda: sentence in text(chromium, "dialog"))
    button(chromium, "Undo now").click()
    wait("the undo stands on the page", lambda: "undo: enough seen" in text(chromium, ".commands"))
    assert feeder.obey() == ["plain"]
    feeder.train(1)
    wait("the mode is plain again", lambda: tile(chromium, "Switched heads") == "none")
    wait("the switch is marked", lambda: "undone" in text(chromium, ".commands li:nth-child(2)"))
    assert not chromium.find_elements(By.XPATH, "//button[.='Undo']"), "an undone switch can be undone again"

    chromium.find_element(By.XPATH, "//summary[.='Audit trail']").click()
    wait("the audit trail names who and why", lambda: "Ada" in text(chromium, "section[aria-label=History] table"))


@pytest.mark.full
def test_a_lost_connection_is_said_and_what_was_missed_comes_after_it(
    chromium: Chrome, service: Service, feeder: Feeder, complaints: Callable[[], list[str]]
) -> None:
    feeder.start()
    feeder.train(5)
    open_run(chromium, service, feeder.run)
    wait("the stream is open", lambda: text(chromium, ".connection") == "live")
    canvas = wait("the heat map", lambda: chromium.find_element(By.CSS_SELECTOR, ".heatmap canvas[tabindex]"))
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    service.stop()
    wait("the loss is said", lambda: "connection lost" in text(chromium, ".connection"))
    service.start()
    feeder.train(20)
    feeder.warn()
    wait("the page is live again", lambda: text(chromium, ".connection") == "live")
    wait("the warning is there", lambda: "its score offset left its peers" in text(chromium, ".warnings"))
    wait("the step is there", lambda: tile(chromium, "Step") == "250")
    assert "layer 1 head 3" in text(chromium, ".reading"), "the reader's choice of a head was lost with the connection"
    refused = complaints()  # the browser's own lines, which the page cannot keep off the console
    # A service that is stopping answers 503 to what it still accepts; after it no connection is made.
    assert all("ERR_" in line or "status of 503" in line for line in refused), refused
