"""Heads are switched, proposals decided and a token asked for, on the page, by a real Chromium."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tests.server.ui.conftest import Service
from tests.server.ui.reading import button, open_run, text, tile, wait

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from tests.server.ui.conftest import Feeder
pytestmark = pytest.mark.servers


@pytest.mark.full
@pytest.mark.promise("S22")
def test_a_switch_that_the_agent_proposes_waits_for_approval_with_a_reason(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start(policy="approve")
    feeder.train(5)
    open_run(chromium, service, feeder.run)
    feeder.warn()
    feeder.propose()
    wait("the proposal is shown", lambda: text(chromium, ".command .state") == "proposed")
    sentence = text(chromium, ".warnings .sentence")
    assert not feeder.obey()
    wait("the card asks for it", lambda: "Approve the switch to exact_delta." in text(chromium, ".warnings .to-do"))
    assert [one.text for one in chromium.find_elements(By.CSS_SELECTOR, "main button.primary")] == ["Approve"]
    chromium.find_element(By.CSS_SELECTOR, ".warnings button.primary").click()
    button(chromium, "Continue").click()
    assert chromium.find_elements(By.CSS_SELECTOR, "dialog input:invalid"), "an approval went on without a reason"
    chromium.find_element(By.NAME, "who").send_keys("Grace")
    chromium.find_element(By.NAME, "reason").send_keys("agreed")
    button(chromium, "Continue").click()
    button(chromium, "Approve now").click()
    wait("it is approved", lambda: text(chromium, ".command .state") == "pending")
    wait("the card follows", lambda: "Approved by " in text(chromium, ".warnings .to-do"))
    assert "approval" not in text(chromium, ".warnings .to-do")
    assert feeder.obey() == ["exact_delta"]
    wait("it is applied", lambda: text(chromium, ".command .state") == "applied")
    feeder.train(1)
    wait("the warning says so", lambda: "now exact_delta" in text(chromium, ".warnings"))
    assert text(chromium, "main").count(sentence) == 2, "only the card and the event of the warning repeat it"


@pytest.mark.promise("S22")
def test_a_rejection_says_how_long_it_holds_before_and_after(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start(policy="approve")
    feeder.train(5)
    feeder.warn()
    feeder.propose()
    open_run(chromium, service, feeder.run)
    wait("the proposal", lambda: button(chromium, "Reject")).click()
    assert "until one of these heads has a new warning" in text(chromium, "dialog")
    chromium.find_element(By.NAME, "who").send_keys("Ada")
    chromium.find_element(By.NAME, "reason").send_keys("a fault of the data")
    button(chromium, "Continue").click()
    button(chromium, "Reject now").click()
    wait("the card says so", lambda: "Rejected by " in text(chromium, ".warnings .to-do"))
    assert "until one of these heads has a new warning" in text(chromium, ".warnings .to-do")
    assert not chromium.find_elements(By.CSS_SELECTOR, "main button.primary")


@pytest.mark.full
def test_a_service_with_a_token_asks_for_it_once_and_takes_orders_from_the_page_alone(
    chromium: Chrome, guarded: Service, feeder: Feeder, complaints: Callable[[], list[str]]
) -> None:
    own = type(feeder)(guarded.client, feeder.run)
    own.start()
    own.train(5)
    chromium.get(f"{guarded.url}/?runs={own.run}")
    token = wait("the token is asked for", lambda: chromium.find_element(By.NAME, "token"))
    token.send_keys("wrong-horse-battery", Keys.ENTER)
    wait("the wrong one is refused in words", lambda: "does not know this token" in text(chromium, ".note.error"))
    token.clear()
    token.send_keys("correct-horse-battery", Keys.ENTER)
    wait("the run is shown", lambda: tile(chromium, "Step") == "50")
    wait("the stream is open", lambda: text(chromium, ".connection") == "live")
    assert "horse" not in chromium.execute_script("return document.cookie + JSON.stringify(localStorage)")

    button(chromium, "New order").click()
    chromium.find_element(By.NAME, "who").send_keys("Ada")
    chromium.find_element(By.NAME, "reason").send_keys("a try")
    button(chromium, "Continue").click()
    button(chromium, "Switch now").click()
    wait("the order is taken", lambda: "a try" in text(chromium, ".commands"))
    assert own.obey() == ["row_corrected"]
    assert all("401" in line for line in complaints())  # the wrong token, in the browser's own words
    chromium.get("about:blank")
