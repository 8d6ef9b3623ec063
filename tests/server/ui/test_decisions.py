"""Decisions on the page in a real Chromium: proposals, orders, rejections and incidents; escaping of foreign markup."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tests.server.ui.conftest import Feeder, Service
from tests.server.ui.page_driver import button, fill, open_run, text, tile, wait, warn_about

from foreshock.contract.wire import Checkpoint, Finished
from foreshock.server.settings import Token

if TYPE_CHECKING:
    from pathlib import Path

    from selenium.webdriver import Chrome
pytestmark = pytest.mark.servers


@pytest.mark.full
@pytest.mark.promise("S22")
def test_proposed_switch_requires_approval_with_reason(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    feeder.start(policy="approve")
    feeder.train(5)
    open_run(chromium, service, feeder.run)
    feeder.warn()
    feeder.propose()
    wait("the proposal is shown", lambda: text(chromium, ".command .state") == "proposed")
    sentence = text(chromium, ".warnings .sentence")
    assert not feeder.obey()
    wait(
        "the card asks for approval", lambda: "Approve the switch to exact_delta." in text(chromium, ".warnings .to-do")
    )
    assert [one.text for one in chromium.find_elements(By.CSS_SELECTOR, "main button.primary")] == ["Approve"]
    chromium.find_element(By.CSS_SELECTOR, ".warnings button.primary").click()
    button(chromium, "Continue").click()
    assert chromium.find_elements(By.CSS_SELECTOR, "dialog input:invalid"), "an approval was accepted without a reason"
    fill(chromium, who="Grace", reason="agreed")
    button(chromium, "Continue").click()
    button(chromium, "Approve now").click()
    wait("the proposal is approved", lambda: text(chromium, ".command .state") == "pending")
    wait("the card shows the approval", lambda: "Approved by " in text(chromium, ".warnings .to-do"))
    assert "approval" not in text(chromium, ".warnings .to-do")
    assert feeder.obey() == ["exact_delta"]
    wait("the order is applied", lambda: text(chromium, ".command .state") == "applied")
    feeder.train(1)
    wait("the warning shows the new mode", lambda: "now exact_delta" in text(chromium, ".warnings"))
    assert text(chromium, "main").count(sentence) == 2, "only the card and the event show the sentence"


@pytest.mark.promise("S22")
def test_page_explains_rejection_stops_order_and_offers_no_switch_after_run_end(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start(policy="approve")
    feeder.train(5)
    feeder.warn()
    feeder.propose()
    open_run(chromium, service, feeder.run)
    wait("the proposal is shown", lambda: button(chromium, "Reject")).click()
    assert "until one of these heads has a new warning" in text(chromium, "dialog")
    fill(chromium, who="Ada", reason="a fault of the data")
    button(chromium, "Continue").click()
    button(chromium, "Reject now").click()
    wait("the card shows the rejection", lambda: "Rejected by " in text(chromium, ".warnings .to-do"))
    assert "until one of these heads has a new warning" in text(chromium, ".warnings .to-do")
    assert not chromium.find_elements(By.CSS_SELECTOR, "main button.primary")

    order = {"who": "Ada", "reason": "a try", "mode": "exact_delta"}
    service.client.post(f"/v1/runs/{feeder.run}/commands", json=order).raise_for_status()
    wait("the order is shown", lambda: button(chromium, "Stop")).click()
    fill(chromium, who="Grace", reason="not that one")
    button(chromium, "Continue").click()
    sentence = f"Stop: switch every head to exact_delta in {feeder.run}. Ranks that have not received it yet"
    wait("the dialog explains the effect before confirmation", lambda: sentence in text(chromium, "dialog"))
    button(chromium, "Stop now").click()
    wait("the order is cancelled", lambda: "cancelled" in text(chromium, ".commands"))
    assert not chromium.find_elements(By.XPATH, "//button[.='Stop' or .='Undo']")
    assert feeder.obey() == []

    feeder.send(Finished(step=feeder.step, unix_seconds=time.time(), status="completed"))
    wait("the run has ended", lambda: "completed" in text(chromium, "header.title .state"))
    assert not chromium.find_elements(By.XPATH, "//button[.='Approve' or .='Switch this head']")


@pytest.mark.full
@pytest.mark.promise("S7")
def test_login_is_required_and_read_only_token_sees_no_switch(
    chromium: Chrome, tmp_path: Path, complaints: Callable[[], list[str]], feeder: Feeder
) -> None:
    reader = Token.of("watcher", "watcher-of-many-runs", ("read",))
    service = Service(tmp_path, token="correct-horse-battery", tokens=f"[{reader.model_dump_json()}]")
    agent = type(feeder)(service.client, feeder.run)
    try:
        agent.start()
        agent.train(5)
        agent.warn()
        switches = "//button[starts-with(., 'Switch') or .='New order']"
        for secret, may_switch in (("watcher-of-many-runs", False), ("correct-horse-battery", True)):
            chromium.get(f"{service.url}/?runs={agent.run}")
            token = wait("the login is shown", lambda: chromium.find_element(By.NAME, "token"))
            token.send_keys("wrong-horse-battery", Keys.ENTER)
            wait(
                "the wrong token is refused with a message",
                lambda: "does not know this token" in text(chromium, ".note.error"),
            )
            token.clear()
            token.send_keys(secret, Keys.ENTER)
            wait("the run is shown", lambda: tile(chromium, "Step") == "50")
            wait("the stream is open", lambda: text(chromium, ".connection") == "live")
            stored = chromium.execute_script("return document.cookie + JSON.stringify(localStorage)")
            assert secret not in stored
            assert bool(chromium.find_elements(By.XPATH, switches)) == may_switch
            if may_switch:
                button(chromium, "New order").click()
                fill(chromium, who="Ada", reason="a try")
                button(chromium, "Continue").click()
                button(chromium, "Switch now").click()
                wait("the order is listed", lambda: "a try" in text(chromium, ".commands"))
                assert agent.obey() == ["row_corrected"]
            button(chromium, "Log out").click()
            wait("the login is shown again", lambda: chromium.find_element(By.NAME, "token"))
        chromium.get("about:blank")  # the page would report that its service is gone
    finally:
        service.close()
    assert all("401" in line for line in complaints())  # wrong tokens, and requests after the session ended


def test_incident_of_144_heads_is_one_card_with_switch_and_resume_plan(chromium: Chrome, service: Service) -> None:
    feeder = Feeder(service.client, "one-card", layers=12, heads=12)
    feeder.start()
    feeder.train(40)
    feeder.send(Checkpoint(step=40, path="out/<b>checkpoint-40", trainer="transformers"))
    feeder.send(*(warn_about(feeder, i // 12, i % 12, forecast_steps=5000.0 - 10 * i) for i in range(144)))
    feeder.send(Checkpoint(step=420, path="out/checkpoint-420", trainer="transformers", requested=True))
    open_run(chromium, service, feeder.run)
    wait("the incident is shown", lambda: "144 heads of layers 0 to 11" in text(chromium, ".warnings"))
    assert len(chromium.find_elements(By.CSS_SELECTOR, ".warnings")) == 1
    assert "of layer 11 head 11 until the largest" in text(chromium, ".warnings")
    assert "Switch every head to row_corrected." in text(chromium, ".warnings .to-do")
    wait("the sparkline is drawn", lambda: chromium.find_elements(By.CSS_SELECTOR, ".warnings .sparkline polyline"))
    buttons = [one.text for one in chromium.find_elements(By.CSS_SELECTOR, ".warnings footer button")]
    assert buttons == ["Switch every head", "Show this head", "Switch this head", "Acknowledge"]
    assert not chromium.find_elements(By.CSS_SELECTOR, ".warnings .layer")
    chromium.find_element(By.XPATH, "//summary[contains(., 'fewest steps left first')]").click()
    layers = wait(
        "the layers are listed", lambda: chromium.find_elements(By.CSS_SELECTOR, ".warnings .layer > summary")
    )
    assert len(layers) == 12
    assert layers[0].text.startswith("layer 11: 12 heads, about 3,600")
    layers[0].click()
    first = wait("the heads are listed", lambda: chromium.find_elements(By.CSS_SELECTOR, ".warnings .layer li"))[0]
    assert first.text.startswith("layer 11 head 11")

    chromium.find_element(By.XPATH, "//summary[.='Resume plan']").click()
    lines = wait(
        "the commands of the resume plan are shown", lambda: text(chromium, ".warnings .resume pre").splitlines()
    )
    assert lines[0] == 'trainer.train(resume_from_checkpoint="out/<b>checkpoint-40")'
    assert lines[1].startswith(f"foreshock switch {feeder.run} --mode row_corrected ")
    checkpoints = [one.text for one in chromium.find_elements(By.CSS_SELECTOR, ".warnings .resume li")]
    assert checkpoints == ["step 420: after a warning out/checkpoint-420", "step 40: clean, keep out/<b>checkpoint-40"]

    chromium.execute_script("localStorage.removeItem('foreshock.who')")
    button(chromium, "Acknowledge").send_keys(Keys.ENTER)
    wait("the input field has the focus", lambda: chromium.switch_to.active_element.tag_name == "input")
    chromium.switch_to.active_element.send_keys(Keys.CONTROL, "a")  # uses only the keyboard
    chromium.switch_to.active_element.send_keys("Ada", Keys.ENTER)
    wait("the incident is acknowledged", lambda: "acknowledged by Ada" in text(chromium, ".warnings header"))
    assert not chromium.find_elements(By.XPATH, "//button[.='Acknowledge']")
    button(chromium, "Switch every head").click()
    wait("the dialog names every head", lambda: "every head" in text(chromium, "dialog"))


def test_rounding_and_score_growth_share_one_card_that_offers_the_switch(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start(qk_clip="never")
    feeder.train(5)
    growing = warn_about(feeder, 0, 1, cause="score growth", signal="score", sentence="Layer 0 head 1 grows.")
    feeder.send(warn_about(feeder, 0, 2), growing)
    open_run(chromium, service, feeder.run)
    wait(
        "the card names both causes",
        lambda: "rounding and score growth · 2 heads" in text(chromium, ".warnings header"),
    )
    assert len(chromium.find_elements(By.CSS_SELECTOR, ".warnings")) == 1
    buttons = [one.text for one in chromium.find_elements(By.CSS_SELECTOR, ".warnings footer button")]
    assert buttons == ["Switch every head", "Show this head", "Acknowledge"], (
        "the first head has score growth, which a switch does not help"
    )
    chromium.find_element(By.XPATH, "//summary[contains(., 'fewest steps left first')]").click()
    wait("the layer is listed", lambda: chromium.find_elements(By.CSS_SELECTOR, ".warnings .layer > summary"))[
        0
    ].click()
    heads = [one.text for one in chromium.find_elements(By.CSS_SELECTOR, ".warnings li .muted")]
    assert [one.split(" · ")[-1] for one in heads] == ["score growth", "rounding"]
    assert [one.text for one in chromium.find_elements(By.CSS_SELECTOR, ".warnings li button")] == [
        "Show", "Show", "Switch",
    ]  # fmt: skip


@pytest.mark.promise("S13")
def test_foreign_markup_is_shown_as_text_and_inline_scripts_are_blocked(
    chromium: Chrome, service: Service, feeder: Feeder, complaints: Callable[[], list[str]]
) -> None:
    policy = feeder.client.get("/").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    markup = "<img src=x onerror=\"document.title='owned'\"><b id=planted>bold</b>"
    feeder.start(labels={"note": markup})
    feeder.train(5)
    feeder.warn(sentence=f"Drift {markup}")
    feeder.client.post(
        f"/v1/runs/{feeder.run}/commands", json={"who": markup[:100], "reason": markup, "mode": "exact_delta"}
    ).raise_for_status()
    open_run(chromium, service, feeder.run)
    wait("the command is shown", lambda: markup in text(chromium, ".commands"))
    assert markup in text(chromium, ".labels")
    assert markup in text(chromium, ".warnings")
    chromium.find_element(By.XPATH, "//summary[.='Audit trail']").click()
    wait("the audit trail is shown", lambda: markup[:100] in text(chromium, "section[aria-label=History] table"))
    chromium.get(service.url)
    wait("the run list shows the label", lambda: markup in text(chromium))
    assert not chromium.find_elements(By.CSS_SELECTOR, "#planted, main img")
    assert chromium.title == "foreshock"
    assert complaints() == []

    blocked = chromium.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.planted = 1'; document.body.append(s);"
        "return window.planted === undefined"
    )
    assert blocked, "an inline script ran"
    [complaint] = complaints()
    assert "Content Security Policy" in complaint

    chromium.get(f"{service.url}/?{urlencode({'runs': markup + '../../v1/audit'})}")
    wait("the unknown run is reported", lambda: "There is no run '<img src=x" in text(chromium, ".note.error"))
    assert not chromium.find_elements(By.CSS_SELECTOR, "#planted, main img")
    assert chromium.title.startswith("<img")
    refused = complaints()
    assert all("404" in line and "/v1/runs/%3Cimg" in line for line in refused), refused
