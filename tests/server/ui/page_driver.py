"""Helpers that use the page as a person does: wait for content, read texts and press buttons."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode

import pytest
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement
    from tests.server.ui.conftest import Feeder, Service

    from foreshock.contract.wire import Verdict
T = TypeVar("T")
MINUS = "\N{MINUS SIGN}"


def wait(what: str, look: Callable[[], T], seconds: float = 60.0) -> T:
    """Return the first truthy result of `look`; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if found := look():
                return found
        except (NoSuchElementException, StaleElementReferenceException):
            pass
        time.sleep(0.05)
    pytest.fail(f"not within {seconds:g} s: {what}")


def text(chromium: Chrome, selector: str = "main") -> str:
    """The visible text of the first match."""
    return chromium.find_element(By.CSS_SELECTOR, selector).text


LOADING = "//figure//p[.='loading'] | //p[.='Loading the values.']"


def button(chromium: Chrome, label: str) -> WebElement:
    """The first button with this text, after all charts have loaded, because a late chart would move the button."""
    found = chromium.find_element(By.XPATH, f"//button[normalize-space()='{label}']")
    wait("the page has loaded", lambda: not chromium.find_elements(By.XPATH, LOADING))
    return found


def open_run(chromium: Chrome, service: Service, *runs: str) -> None:
    """Open the page of these runs and wait until every chart has loaded."""
    chromium.get(f"{service.url}/?runs={','.join(runs)}")
    wait(
        "the charts are drawn",
        lambda: (
            chromium.find_elements(By.CSS_SELECTOR, ".chart .u-wrap") and not chromium.find_elements(By.XPATH, LOADING)
        ),
    )


def tile(chromium: Chrome, name: str) -> str:
    """The value of a tile in the summary."""
    return chromium.find_element(By.XPATH, f"//dl[contains(@class,'tiles')]/div[dt='{name}']/dd").text


def fill(chromium: Chrome, **fields: str) -> None:
    """Replace the values of these fields of the dialog."""
    for name, value in fields.items():
        field = chromium.find_element(By.CSS_SELECTOR, f"dialog [name={name}]")
        field.clear()
        field.send_keys(value)


def listed(chromium: Chrome) -> list[str]:
    """The run names in the list, from top to bottom."""
    script = "return [...document.querySelectorAll('tbody .run')].map(a => a.querySelector('[title]').title)"
    names: list[str] = chromium.execute_script(script)
    return names


def open_list(chromium: Chrome, service: Service, **query: str) -> None:
    """Open the list of runs with this query."""
    chromium.get(f"{service.url}/?{urlencode(query)}")
    wait("the list", lambda: listed(chromium))


def warn_about(feeder: Feeder, layer: int, head: int, **fields: Any) -> Verdict:
    """A warning about a head, with evidence."""
    defaults: dict[str, Any] = {
        "name": f"offset-{layer}-{head}",
        "evidence": {"offset": -6.25, "offset_before": -3.0, "score": 75.0, "tied_share": 0.1, "window_steps": 900},
        "forecast_steps": 2000.0 + 10 * head,
        "forecast_low_steps": 1500.0,
        "sentence": f"Layer {layer} head {head} drifts: its score offset left its peers and keeps growing.",
    }
    return feeder.verdict(feeder.step, layer, head, **defaults | fields)
