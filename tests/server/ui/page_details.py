"""What of the page shows only after something is pressed: every dialog, an unfolded incident, the audit trail.

`fill` sends the runs that have all of it, and `open_details` presses it, one after another: for pictures and for tests.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeVar

import httpx
from selenium.common.exceptions import NoSuchElementException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from foreshock.contract.modes import DEFAULT_MITIGATION
from foreshock.contract.wire import Ack, Event, Finished, Switched
from foreshock.server.testing import FakeRank, post

T = TypeVar("T")
HEADS: Final = ((0, 2), *((layer, head) for layer in range(3) for head in range(12) if (layer, head) != (0, 2)))[:30]
PATIENCE_SECONDS: Final = 60.0
_DIALOG: Final = "dialog"


class Detail(NamedTuple):
    """A view: what is pressed to see it, and the part of the page that it is."""

    name: str
    press: str
    part: str = _DIALOG
    confirmed: bool = False
    """The dialog asks for a name and a reason, and says in words what will happen: both are views."""
    of_ended: bool = False


DETAILS: Final = (
    Detail("new order", "New order", confirmed=True),
    Detail("approve", "Approve", confirmed=True),
    Detail("reject", "Reject", confirmed=True),
    Detail("stop", "Stop", confirmed=True),
    Detail("undo", "Undo", confirmed=True),
    Detail("name and notes", "Name and notes"),
    Detail("delete", "Delete", confirmed=True, of_ended=True),
    Detail("incident", "30 heads in 3 layers, fewest steps left first", "section[aria-label=Warnings]"),
    Detail("acknowledge", "Acknowledge", "section[aria-label=Warnings]"),
    Detail("audit trail", "Audit trail", "section[aria-label=History]"),
)


def fill(client: httpx.Client, run: str, who: str, reason: str) -> None:
    """A run that trains, with 30 heads warned about, a proposal, an order applied and one under way; `run`-ended."""
    rank = FakeRank(run, layers=3, heads=range(12))
    others = [
        rank.verdict(60, layer, head, name=f"w-{layer}-{head}", forecast_steps=2000.0 + 9 * (layer + head))
        for layer, head in HEADS[1:]
    ]
    first = rank.verdict(60, *HEADS[0], forecast_steps=900.0)
    started = rank.started(policy="approve", mitigation=DEFAULT_MITIGATION)
    _send(client, rank, started, *(rank.sample(step) for step in range(1, 61)), first, *others)
    _order(client, run, who, reason, heads=[[1, 3]])
    ordered = _send(client, rank, rank.sample(61)).commands
    _send(client, rank, *(rank.answer(command, 61) for command in ordered))
    _send(client, rank, Switched(
        id="proposal", step=62, verdict=first.id, outcome="proposed", heads=HEADS, before=("plain",) * len(HEADS),
        after=(DEFAULT_MITIGATION,) * len(HEADS), reason=reason))  # fmt: skip
    _order(client, run, who, reason, heads=[[2, 1]])
    said = {"who": who, "display_name": run, "tags": ["keep", "seed study"], "notes": reason}
    client.patch(f"/v1/runs/{run}", json=said).raise_for_status()
    ended = FakeRank(f"{run}-ended", layers=1, heads=(0,))
    _send(client, ended, ended.started(), ended.sample(7), Finished(step=7, unix_seconds=7.0, status="completed"))


def open_details(browser: Chrome, url: str, run: str, who: str, reason: str) -> Iterator[tuple[str, str]]:
    """Each view in turn, open: (name, selector of its part). Nothing of it is ordered, changed or deleted."""
    for ended in (False, True):
        name = f"{run}-ended" if ended else run
        browser.get(f"{url}/?runs={name}")
        _until("what happened", lambda: browser.find_element(By.CSS_SELECTOR, ".events li:not(.empty)"))
        for detail in (one for one in DETAILS if one.of_ended == ended):
            _press(browser, "//main", detail.press)
            if detail.part != _DIALOG:
                _unfold(browser, detail)
                yield detail.name, detail.part
                continue
            _until("the dialog", lambda: browser.find_element(By.CSS_SELECTOR, "dialog[open] form"))
            yield detail.name, _DIALOG
            if detail.confirmed:
                for field, text in (("who", who), ("reason", reason)):
                    browser.find_element(By.CSS_SELECTOR, f"dialog [name={field}]").clear()
                    browser.find_element(By.CSS_SELECTOR, f"dialog [name={field}]").send_keys(text)
                _press(browser, "//dialog", "Continue")
                _until("the confirmation", lambda: browser.find_element(By.CSS_SELECTOR, "dialog .confirm"))
                yield f"{detail.name}, confirmed", _DIALOG
            browser.switch_to.active_element.send_keys(Keys.ESCAPE)
            _until("it is closed", lambda: not browser.find_elements(By.TAG_NAME, "dialog"))


def _unfold(browser: Chrome, detail: Detail) -> None:
    """What is folded within the view too, and wait for what it loads."""
    if detail.name == "incident":
        _until("its layers", lambda: browser.find_elements(By.CSS_SELECTOR, ".warnings .layer"))
        browser.execute_script("document.querySelectorAll('.warnings .layer').forEach((one) => (one.open = true))")
    elif detail.name == "audit trail":
        _until("its rows", lambda: browser.find_elements(By.CSS_SELECTOR, f"{detail.part} tbody tr"))
    else:
        _until("its form", lambda: browser.find_elements(By.CSS_SELECTOR, f"{detail.part} form"))


def _press(browser: Chrome, within: str, text: str) -> None:
    """Press the first button or summary with this text; raises TimeoutError where there is none."""
    found = f"{within}//*[self::button or self::summary][normalize-space()='{text}']"
    pressed = _until(text, lambda: browser.find_element(By.XPATH, found))
    browser.execute_script("arguments[0].scrollIntoView({ block: 'center' })", pressed)  # clear of the bar
    pressed.click()


def _until(what: str, look: Callable[[], T]) -> T:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            if found := look():
                return found
        except NoSuchElementException:
            pass
        time.sleep(0.02)
    raise TimeoutError(f"not within {PATIENCE_SECONDS:g} s: {what}")


def _order(client: httpx.Client, run: str, who: str, reason: str, heads: list[list[int]]) -> None:
    order = {"who": who, "reason": reason, "heads": heads, "mode": DEFAULT_MITIGATION}
    client.post(f"/v1/runs/{run}/commands", json=order).raise_for_status()


def _send(client: httpx.Client, rank: FakeRank, *events: Event) -> Ack:
    return Ack.model_validate_json(post(client, rank.batch(*events)).raise_for_status().content)
