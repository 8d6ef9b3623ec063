"""Markup that others wrote is text, and the page's policy lets nothing else in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest
from selenium.webdriver.common.by import By
from tests.server.ui.reading import open_run, text, wait

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from tests.server.ui.conftest import Feeder, Service
pytestmark = pytest.mark.servers


def test_markup_in_labels_sentences_and_reasons_is_shown_and_never_rendered(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
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
    wait("the list shows the label", lambda: markup in text(chromium))
    assert not chromium.find_elements(By.ID, "planted")
    assert not chromium.find_elements(By.CSS_SELECTOR, "main img")
    assert chromium.title == "foreshock"


def test_an_address_full_of_markup_is_shown_as_text_and_asks_for_nothing_else(
    chromium: Chrome, service: Service, complaints: Callable[[], list[str]]
) -> None:
    name = "<img src=x onerror=\"document.title='owned'\"><b id=planted>../../v1/audit"
    chromium.get(f"{service.url}/?{urlencode({'runs': name})}")
    wait("it is refused in words", lambda: "There is no run '<img src=x" in text(chromium, ".note.error"))
    assert not chromium.find_elements(By.CSS_SELECTOR, "#planted, main img")
    assert chromium.title.startswith("<img")
    refused = complaints()
    assert all("404" in line and "/v1/runs/%3Cimg" in line for line in refused), refused


def test_the_content_security_policy_is_strict_and_nothing_breaks_it(
    chromium: Chrome, service: Service, feeder: Feeder, complaints: Callable[[], list[str]]
) -> None:
    answer = feeder.client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    feeder.start()
    feeder.train(5)
    open_run(chromium, service, feeder.run)
    planted = chromium.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.planted = 1'; document.body.append(s);"
        "return window.planted === undefined"
    )
    assert planted, "an inline script ran"
    [complaint] = complaints()
    assert "Content Security Policy" in complaint
