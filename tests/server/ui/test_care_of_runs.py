"""What people do with a run as a whole, where an address leads, and orders that are stopped: on the page."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from tests.server.ui.conftest import Feeder, Service
from tests.server.ui.reading import button, open_run, text, wait
from tests.server.ui.test_fleet import listed, open_list

from foreshock.contract.wire import Finished

if TYPE_CHECKING:
    from collections.abc import Callable

    from selenium.webdriver import Chrome

pytestmark = pytest.mark.servers


def fill(chromium: Chrome, **fields: str) -> None:
    """Write into the fields of the dialog, in place of what stands there."""
    for name, value in fields.items():
        field = chromium.find_element(By.CSS_SELECTOR, f"dialog [name={name}]")
        field.clear()
        field.send_keys(value)


def test_a_run_is_named_tagged_and_noted_on_its_page_and_found_by_that_in_the_list(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start()
    feeder.train(5)
    open_run(chromium, service, feeder.run)
    button(chromium, "Name and notes").click()
    fill(chromium, display_name="Hope and glory", tags="keep, seed study,keep", notes="<b>two</b>\nlines", who="Ada")
    button(chromium, "Save").click()
    wait("its name", lambda: text(chromium, "header.title h1") == "Hope and glory")
    assert feeder.run in text(chromium, "header.title .identity"), "its own name stays in sight"
    assert [tag.text for tag in chromium.find_elements(By.CSS_SELECTOR, ".tags li")] == ["keep", "seed study"]
    assert "<b>two</b>" in text(chromium, ".notes")
    wait("focus comes back", lambda: chromium.switch_to.active_element.text == "Name and notes")
    wait("it is told", lambda: "Ada (local) changed the run's display name" in text(chromium, ".events"))
    chromium.find_element(By.XPATH, "//summary[.='Audit trail']").click()
    wait("it stands in the audit trail", lambda: "described" in text(chromium, "section[aria-label=History] table"))

    for asked in ({"q": "glory"}, {"q": "seed study"}, {"label": "seed study"}):
        open_list(chromium, service, **asked)
        assert listed(chromium) == ["Hope and glory"], asked
    open_list(chromium, service, q=feeder.run)
    assert "Hope and glory" in listed(chromium), "it is found by its own name too"
    assert service.client.get(f"/v1/runs/{feeder.run}").json()["run"] == feeder.run


def test_a_run_is_deleted_after_a_confirmation_and_goes_from_every_page_that_shows_it(
    chromium: Chrome, service: Service, feeder: Feeder, complaints: Callable[[], list[str]]
) -> None:
    feeder.start()
    feeder.train(5)
    other = Feeder(service.client, f"{feeder.run[:80]}-stays")
    other.start()
    open_run(chromium, service, feeder.run)
    assert not chromium.find_elements(By.XPATH, "//button[.='Delete']"), "a run that trains would come back"
    feeder.send(Finished(step=feeder.step, unix_seconds=time.time(), status="completed"))
    wait("it has ended", lambda: button(chromium, "Delete")).click()
    fill(chromium, who="Ada", reason="a typing error")
    button(chromium, "Continue").click()
    sentence = f"Delete {feeder.run} with its 50 steps"
    wait("what is deleted is said before it is", lambda: sentence in text(chromium, "dialog"))
    assert service.client.get(f"/v1/runs/{feeder.run}").status_code == 200
    button(chromium, "Delete now").click()
    wait("the list without it", lambda: listed(chromium) and feeder.run not in listed(chromium))
    assert other.run in listed(chromium)
    rows = service.client.get("/v1/audit").json()["rows"]
    [(actor, details)] = [
        (r["actor"], r["details"]) for r in rows if (r["action"], r["run"]) == ("deleted", feeder.run)
    ]
    assert (actor, details) == ("Ada (local)", {"reason": "a typing error"})

    other.send(Finished(step=0, unix_seconds=time.time(), status="completed"))
    open_list(chromium, service, q=other.run)
    order = {"who": "Grace", "reason": "elsewhere"}
    service.client.delete(f"/v1/runs/{other.run}", params=order).raise_for_status()
    wait("a page that shows it hears of it", lambda: "No run matches" in text(chromium))
    gone = [line for line in complaints() if "404" not in line]  # what was asked of it meanwhile
    assert not gone, gone


def shown(chromium: Chrome) -> dict[str, list[str]]:
    """What the address asks for."""
    return parse_qs(urlsplit(chromium.current_url).query)


def test_an_address_names_head_measure_and_steps_and_follows_what_is_chosen(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start()
    feeder.train(60)
    place = {"runs": feeder.run, "head": "1.3", "metric": "head.query_norm", "steps": "200-400"}
    chromium.get(f"{service.url}/?{urlencode(place)}")
    wait("its charts", lambda: "layer 1 head 3" in text(chromium, ".chart .legend"))
    assert text(chromium, ".chart h3") == "Spectral norm of W_Q", "what is asked for is the first chart"
    assert button(chromium, "Show all steps")
    measure = Select(wait("the heat map", lambda: chromium.find_element(By.CSS_SELECTOR, ".pick select")))
    assert measure.first_selected_option.get_attribute("value") == "head.query_norm"
    assert shown(chromium) == {name: [value] for name, value in place.items()}, "to look changes nothing"

    measure.select_by_value("head.risk")
    cells = wait("its cells", lambda: chromium.find_element(By.CSS_SELECTOR, ".heatmap canvas[tabindex]"))
    cells.send_keys(Keys.ARROW_LEFT)
    button(chromium, "Show all steps").click()
    chosen = {"runs": [feeder.run], "head": ["1.2"], "metric": ["head.risk"]}
    wait("the address follows", lambda: shown(chromium) == chosen)
    chromium.get(chromium.current_url)
    wait("it is there again", lambda: "layer 1 head 2" in text(chromium, ".chart .legend"))
    assert not chromium.find_elements(By.XPATH, "//button[.='Show all steps']")


def test_an_order_under_way_is_stopped_on_the_page(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    feeder.start()
    feeder.train(5)
    order = {"who": "Ada", "reason": "a try", "mode": "exact_delta"}
    service.client.post(f"/v1/runs/{feeder.run}/commands", json=order).raise_for_status()
    open_run(chromium, service, feeder.run)
    wait("the order", lambda: text(chromium, ".command .state") == "pending")
    button(chromium, "Stop").click()
    fill(chromium, who="Grace", reason="not that one")
    button(chromium, "Continue").click()
    sentence = f"Stop the switch of every head of {feeder.run} to exact_delta: ranks that have not received it yet"
    wait("what happens is said before it does", lambda: sentence in text(chromium, "dialog"))
    button(chromium, "Stop now").click()
    wait("it is stopped", lambda: text(chromium, ".command .state") == "cancelled")
    assert not chromium.find_elements(By.XPATH, "//button[.='Stop' or .='Undo']")
    assert feeder.obey() == []
