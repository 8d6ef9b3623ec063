"""Reads the page as a person does: waits for what is to appear, presses what bears a label."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import pytest
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement
    from tests.server.ui.conftest import Service
T = TypeVar("T")
MINUS = "\N{MINUS SIGN}"


def wait(what: str, look: Callable[[], T], seconds: float = 60.0) -> T:
    """The first truthy answer of `look`; fails with `what` after `seconds`."""
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
    """What a reader sees of the first match."""
    return chromium.find_element(By.CSS_SELECTOR, selector).text


def button(chromium: Chrome, label: str) -> WebElement:
    """The first button with this text."""
    return chromium.find_element(By.XPATH, f"//button[normalize-space()='{label}']")


def open_run(chromium: Chrome, service: Service, *runs: str) -> None:
    """Open the page of these runs and wait until every chart is drawn or says that it has nothing to draw."""
    chromium.get(f"{service.url}/?runs={','.join(runs)}")
    wait(
        "the charts are drawn",
        lambda: (
            chromium.find_elements(By.CSS_SELECTOR, ".chart .u-wrap")
            and not chromium.find_elements(By.XPATH, "//figure//p[.='loading']")
        ),
    )


def tile(chromium: Chrome, name: str) -> str:
    """A value of the summary."""
    return chromium.find_element(By.XPATH, f"//dl[contains(@class,'tiles')]/div[dt='{name}']/dd").text
