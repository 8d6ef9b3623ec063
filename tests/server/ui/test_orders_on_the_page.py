"""Heads are switched, proposals decided and a token asked for, on the page, by a real Chromium."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tests.server.ui.reading import button, open_run, text, tile, wait

from foreshock.contract.modes import MODES
from foreshock.contract.wire import Finished

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from tests.server.ui.conftest import Feeder, Service
pytestmark = pytest.mark.servers


def test_an_order_may_join_modes_and_one_takes_the_place_of_what_it_excludes(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start()
    feeder.train(5)
    open_run(chromium, service, feeder.run)
    button(chromium, "New order").click()
    offered = [box.get_attribute("value") for box in chromium.find_elements(By.NAME, "mode")]
    assert offered == [mode.name for mode in MODES if mode.served]

    def chosen(*toggled: str) -> str:
        for name in toggled:
            chromium.find_element(By.CSS_SELECTOR, f"input[name=mode][value={name}]").click()
        return chromium.find_element(By.XPATH, "//legend[starts-with(., 'Mode')]").text

    assert chosen() == "Mode: exact delta"
    assert chosen("stable_softmax") == "Mode: exact delta + stable softmax"
    assert chosen("paper_softmax") == "Mode: exact delta + paper softmax"
    assert chosen("exact_delta", "paper_softmax") == "Mode: plain"
    chosen("stable_softmax", "exact_delta")
    chromium.find_element(By.NAME, "who").send_keys("Ada")
    chromium.find_element(By.NAME, "reason").send_keys("a try")
    button(chromium, "Continue").click()
    button(chromium, "Switch now").click()
    wait("the order stands on the page", lambda: "exact delta + stable softmax" in text(chromium, ".commands"))
    assert feeder.obey() == ["exact_delta+stable_softmax"]


def test_a_switch_that_the_agent_proposes_waits_for_approval_with_a_reason(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start(policy="approve")
    feeder.train(5)
    open_run(chromium, service, feeder.run)
    feeder.warn()
    feeder.propose()
    wait("the proposal is shown", lambda: text(chromium, ".command .state") == "proposed")
    assert not feeder.obey()
    button(chromium, "Approve").click()
    button(chromium, "Continue").click()
    assert chromium.find_elements(By.CSS_SELECTOR, "dialog input:invalid"), "an approval went on without a reason"
    chromium.find_element(By.NAME, "who").send_keys("Grace")
    chromium.find_element(By.NAME, "reason").send_keys("agreed")
    button(chromium, "Continue").click()
    button(chromium, "Approve now").click()
    wait("it is approved", lambda: text(chromium, ".command .state") == "pending")
    assert feeder.obey() == ["exact_delta"]
    wait("it is applied", lambda: text(chromium, ".command .state") == "applied")
    feeder.train(1)
    wait("the warning says so", lambda: "now exact delta" in text(chromium, ".warnings"))


def test_an_order_under_way_when_the_run_ends_is_refused_on_the_page_with_the_reason(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start()
    feeder.train(5)
    order = {"who": "Ada", "reason": "a try", "mode": "exact_delta"}
    service.client.post(f"/v1/runs/{feeder.run}/commands", json=order).raise_for_status()
    open_run(chromium, service, feeder.run)
    wait("the order", lambda: text(chromium, ".command .state") == "pending")
    feeder.send(Finished(step=feeder.step, unix_seconds=time.time(), status="completed"))
    wait("it is refused", lambda: text(chromium, ".command .state") == "refused")
    assert "Nobody is left to switch every head: every rank that could ended" in text(chromium, ".command")
    assert not chromium.find_elements(By.XPATH, "//button[.='Stop' or .='Undo']")


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
    assert own.obey() == ["exact_delta"]
    assert all("401" in line for line in complaints())  # the wrong token, in the browser's own words
    chromium.get("about:blank")
