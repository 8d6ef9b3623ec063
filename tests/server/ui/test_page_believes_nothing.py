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
pytestmark = [pytest.mark.servers, pytest.mark.promise("S13")]


def test_markup_that_others_wrote_is_text_and_the_policy_lets_no_script_in(
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
    wait("the list shows the label", lambda: markup in text(chromium))
    assert not chromium.find_elements(By.CSS_SELECTOR, "#planted, main img")
    assert chromium.title == "foreshock"
    assert complaints() == []

    planted = chromium.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.planted = 1'; document.body.append(s);"
        "return window.planted === undefined"
    )
    assert planted, "an inline script ran"
    [complaint] = complaints()
    assert "Content Security Policy" in complaint

    chromium.get(f"{service.url}/?{urlencode({'runs': markup + '../../v1/audit'})}")
    wait("it is refused in words", lambda: "There is no run '<img src=x" in text(chromium, ".note.error"))
    assert not chromium.find_elements(By.CSS_SELECTOR, "#planted, main img")
    assert chromium.title.startswith("<img")
    refused = complaints()
    assert all("404" in line and "/v1/runs/%3Cimg" in line for line in refused), refused
