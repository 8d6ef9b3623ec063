"""Heads are switched, proposals decided and a token asked for, on the page, by a real Chromium."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tests.server.ui.conftest import Service
from tests.server.ui.reading import button, open_run, text, tile, wait

from foreshock.contract.modes import MODES
from foreshock.contract.wire import Finished

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from tests.server.ui.conftest import Feeder
pytestmark = pytest.mark.servers


def test_an_order_may_join_modes(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    feeder.start()
    feeder.train(5)
    open_run(chromium, service, feeder.run)
    button(chromium, "New order").click()
    offered = [box.get_attribute("value") for box in chromium.find_elements(By.NAME, "mode")]
    assert offered == [mode.name for mode in MODES]

    def chosen(*toggled: str) -> str:
        for name in toggled:
            chromium.find_element(By.CSS_SELECTOR, f"input[name=mode][value={name}]").click()
        return chromium.find_element(By.XPATH, "//legend[starts-with(., 'Mode')]").text

    assert chosen() == "Mode: row_corrected"
    assert chosen("paper_softmax") == "Mode: paper_softmax+row_corrected"
    assert chosen("row_corrected", "paper_softmax") == "Mode: plain"
    chosen("paper_softmax", "exact_delta")
    chromium.find_element(By.NAME, "who").send_keys("Ada")
    chromium.find_element(By.NAME, "reason").send_keys("a try")
    button(chromium, "Continue").click()
    button(chromium, "Switch now").click()
    wait("the order stands on the page", lambda: "exact_delta+paper_softmax" in text(chromium, ".commands"))
    assert feeder.obey() == ["exact_delta+paper_softmax"]


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
    assert own.obey() == ["row_corrected"]
    assert all("401" in line for line in complaints())  # the wrong token, in the browser's own words
    chromium.get("about:blank")


@pytest.mark.full
def test_a_token_that_may_only_send_is_named_with_the_scope_that_it_lacks(chromium: Chrome, tmp_path: Path) -> None:
    secret = "only-for-sending-0001"
    token = {"name": "cluster", "sha256": hashlib.sha256(secret.encode()).hexdigest(), "scopes": ["ingest"]}
    service = Service(tmp_path, tokens=json.dumps([token]))
    try:
        chromium.get(service.url)
        wait("the login", lambda: chromium.find_element(By.NAME, "token")).send_keys(secret, Keys.ENTER)
        wait("the reason", lambda: "lacks the scope read" in text(chromium, ".note.error"))
        assert "it has ingest" in text(chromium, ".note.error")
        assert "connection lost" not in text(chromium, "body")
        chromium.get("about:blank")
    finally:
        service.close()


@pytest.mark.full
def test_a_session_that_was_ended_elsewhere_is_named_as_the_reason_for_the_login(
    chromium: Chrome, tmp_path: Path
) -> None:
    secret = "reads-all-runs-0001"
    token = {"name": "reader", "sha256": hashlib.sha256(secret.encode()).hexdigest(), "scopes": ["read"]}
    service = Service(tmp_path, tokens=json.dumps([token]))
    try:
        chromium.get(service.url)
        wait("the login", lambda: chromium.find_element(By.NAME, "token"))
        assert "session has ended" not in text(chromium, "body")
        chromium.find_element(By.NAME, "token").send_keys(secret, Keys.ENTER)
        wait("the stream", lambda: "live" in text(chromium, ".connection"))
        csrf = "fetch('v1/session').then((a) => a.json())"
        out = "fetch('v1/logout?everywhere=true', {method: 'POST', headers: {'X-CSRF-Token': who.csrf_token}})"
        chromium.execute_script(f"{csrf}.then((who) => {out})")
        wait("the reason", lambda: "Your session has ended" in text(chromium, ".login"), 60)
        assert "connection lost" not in text(chromium, "body")
        chromium.get("about:blank")
    finally:
        service.close()


def test_an_unknown_run_leads_back_to_the_list(
    chromium: Chrome, service: Service, complaints: Callable[[], list[str]]
) -> None:
    chromium.get(f"{service.url}/?runs=nobody-knows-it")
    wait("the sentence", lambda: "There is no run" in text(chromium, ".note.error"))
    chromium.find_element(By.LINK_TEXT, "All runs").click()
    wait("the list", lambda: not chromium.find_elements(By.CSS_SELECTOR, ".note.error"))
    assert all("404" in one for one in complaints())


def test_an_order_is_one_line_of_what_happened_until_every_update_is_asked_for(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start()
    feeder.train(2)
    order = {"who": "Ada", "reason": "a try", "mode": "exact_delta"}
    service.client.post(f"/v1/runs/{feeder.run}/commands", json=order).raise_for_status()
    feeder.obey()
    open_run(chromium, service, feeder.run)
    own = "//ol[contains(@class,'events')]/li[contains(., 'exact_delta')]"
    lines = wait("the order", lambda: chromium.find_elements(By.XPATH, own))
    assert ["is applied" in line.text for line in lines] == [True]
    chromium.find_element(By.XPATH, "//label[contains(., 'every update')]/input").click()
    assert len(chromium.find_elements(By.XPATH, own)) == 4  # pending, delivered, the rank's answer, applied
