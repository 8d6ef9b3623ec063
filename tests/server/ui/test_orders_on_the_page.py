"""Proposals are decided, orders stopped, and a token asked for, on the page, by a real Chromium."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tests.server.ui.conftest import Service
from tests.server.ui.reading import button, fill, open_run, text, tile, wait

from foreshock.contract.wire import Finished
from foreshock.server.settings import Token

if TYPE_CHECKING:
    from pathlib import Path

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
    fill(chromium, who="Grace", reason="agreed")
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
def test_a_rejection_says_how_long_it_holds_an_order_is_stopped_and_an_ended_run_offers_no_switch(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start(policy="approve")
    feeder.train(5)
    feeder.warn()
    feeder.propose()
    open_run(chromium, service, feeder.run)
    wait("the proposal", lambda: button(chromium, "Reject")).click()
    assert "until one of these heads has a new warning" in text(chromium, "dialog")
    fill(chromium, who="Ada", reason="a fault of the data")
    button(chromium, "Continue").click()
    button(chromium, "Reject now").click()
    wait("the card says so", lambda: "Rejected by " in text(chromium, ".warnings .to-do"))
    assert "until one of these heads has a new warning" in text(chromium, ".warnings .to-do")
    assert not chromium.find_elements(By.CSS_SELECTOR, "main button.primary")

    order = {"who": "Ada", "reason": "a try", "mode": "exact_delta"}
    service.client.post(f"/v1/runs/{feeder.run}/commands", json=order).raise_for_status()
    wait("the order", lambda: button(chromium, "Stop")).click()
    fill(chromium, who="Grace", reason="not that one")
    button(chromium, "Continue").click()
    sentence = f"Stop: switch every head to exact_delta in {feeder.run}. Ranks that have not received it yet"
    wait("what happens is said before it does", lambda: sentence in text(chromium, "dialog"))
    button(chromium, "Stop now").click()
    wait("it is stopped", lambda: "cancelled" in text(chromium, ".commands"))
    assert not chromium.find_elements(By.XPATH, "//button[.='Stop' or .='Undo']")
    assert feeder.obey() == []

    feeder.send(Finished(step=feeder.step, unix_seconds=time.time(), status="completed"))
    wait("the run has ended", lambda: "completed" in text(chromium, "header.title .state"))
    assert not chromium.find_elements(By.XPATH, "//button[.='Approve' or .='Switch this head']")


@pytest.mark.full
@pytest.mark.promise("S7")
def test_a_service_with_tokens_asks_for_one_and_who_may_only_read_sees_no_switch(
    chromium: Chrome, tmp_path: Path, complaints: Callable[[], list[str]], feeder: Feeder
) -> None:
    reader = Token.of("watcher", "watcher-of-many-runs", ("read",))
    service = Service(tmp_path, token="correct-horse-battery", tokens=f"[{reader.model_dump_json()}]")
    own = type(feeder)(service.client, feeder.run)
    try:
        own.start()
        own.train(5)
        own.warn()
        switches = "//button[starts-with(., 'Switch') or .='New order']"
        for secret, found in (("watcher-of-many-runs", False), ("correct-horse-battery", True)):
            chromium.get(f"{service.url}/?runs={own.run}")
            token = wait("the token is asked for", lambda: chromium.find_element(By.NAME, "token"))
            token.send_keys("wrong-horse-battery", Keys.ENTER)
            wait(
                "the wrong one is refused in words", lambda: "does not know this token" in text(chromium, ".note.error")
            )
            token.clear()
            token.send_keys(secret, Keys.ENTER)
            wait("the run is shown", lambda: tile(chromium, "Step") == "50")
            wait("the stream is open", lambda: text(chromium, ".connection") == "live")
            stored = chromium.execute_script("return document.cookie + JSON.stringify(localStorage)")
            assert secret not in stored
            assert bool(chromium.find_elements(By.XPATH, switches)) == found
            if found:
                button(chromium, "New order").click()
                fill(chromium, who="Ada", reason="a try")
                button(chromium, "Continue").click()
                button(chromium, "Switch now").click()
                wait("the order is taken", lambda: "a try" in text(chromium, ".commands"))
                assert own.obey() == ["row_corrected"]
            button(chromium, "Log out").click()
            wait("it asks for a token again", lambda: chromium.find_element(By.NAME, "token"))
        chromium.get("about:blank")  # a page whose service has gone would complain
    finally:
        service.close()
    assert all("401" in line for line in complaints())  # wrong tokens, and what was asked when a session ended
