"""The list of runs: urgent runs first, search, filters, sorting, comparison, descriptions and deletion."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select
from tests.server.ui.conftest import Feeder, Service
from tests.server.ui.page_driver import button, fill, listed, open_list, text, wait

from foreshock.contract.wire import Finished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from selenium.webdriver import Chrome

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with 30 healthy runs, one with a warning and one that has ended, with three labels."""
    service = Service(tmp_path_factory.mktemp("fleet"))
    try:
        for number in range(30):
            feeder = Feeder(service.client, f"sweep/{number:03d}", layers=1, heads=1, drift=number / 10)
            feeder.start(labels={"team": "speech" if number % 2 else "vision"})
            feeder.train(1)
        failing = Feeder(service.client, "zz-failing", layers=1, heads=4, drift=100)
        failing.start(labels={"team": "text"})
        failing.train(4)
        failing.warn()
        ended = Feeder(service.client, "a-done", layers=1, heads=4)
        ended.start()
        ended.train(2)
        ended.send(Finished(step=20, unix_seconds=time.time(), status="completed"))
        yield service
    finally:
        service.close()


def choose(chromium: Chrome, name: str, option: str) -> None:
    """Choose an option of the select with this label."""
    Select(chromium.find_element(By.CSS_SELECTOR, f"select[aria-label='{name}']")).select_by_visible_text(option)


def search(chromium: Chrome, query: str) -> None:
    """Type into the search field."""
    field = chromium.find_element(By.CSS_SELECTOR, "input[type=search]")
    field.clear()
    field.send_keys(query)


@pytest.mark.promise("S23")
def test_run_list_sorts_filters_searches_and_compares_runs_and_updates_url(chromium: Chrome, fleet: Service) -> None:
    open_list(chromium, fleet)
    names = listed(chromium)
    assert [*names[:2], names[-1]] == ["zz-failing", "sweep/029", "a-done"], (
        "the most urgent run is first and the ended run is last"
    )
    assert text(chromium, "tbody .severity").endswith("warning")
    search(chromium, "02 SPEECH")
    wait("matching runs are listed", lambda: set(listed(chromium)) == {f"sweep/02{digit}" for digit in (1, 3, 5, 7, 9)})
    search(chromium, "nobody-is-called-so")
    wait("the list says that no run matches", lambda: "No matching runs" in text(chromium, "main"))

    open_list(chromium, fleet)
    choose(chromium, "state", "With a warning")
    assert listed(chromium) == ["zz-failing"]
    choose(chromium, "state", "Any state")
    choose(chromium, "label", "team=vision")
    choose(chromium, "order", "By name")
    search(chromium, "sweep/00")
    wait("matching runs are listed", lambda: len(listed(chromium)) == 5)
    assert "5 of 32 match" in text(chromium, "main")
    chromium.get(chromium.current_url)
    wait(
        "the reloaded page lists the same runs",
        lambda: listed(chromium) == [f"sweep/00{number}" for number in (0, 2, 4, 6, 8)],
    )
    open_list(chromium, fleet, risk="alarm", sort="nonsense")
    assert "zz-failing" in listed(chromium)
    assert "sweep/000" not in listed(chromium)

    chosen = ["a-done", "zz-failing"]
    open_list(chromium, fleet)
    for name in chosen:
        chromium.find_element(By.CSS_SELECTOR, f"[aria-label='compare {name}']").click()
    button(chromium, "Compare 2 runs").click()
    wait("the chosen runs are compared", lambda: "Comparing 2 runs" in text(chromium, ".crumbs"))
    assert chromium.current_url.endswith(f"?runs={','.join(chosen)}")
    first = "return [...document.querySelector('.chart .legend').querySelectorAll('.name')].map(each => each.innerText)"
    wait("the charts are drawn", lambda: chromium.find_elements(By.CSS_SELECTOR, ".chart .u-wrap"))
    wait("the first chart names both runs", lambda: chromium.execute_script(first) == chosen)
    rows = chromium.find_elements(By.CSS_SELECTOR, ".summary tbody tr")
    assert [row.find_element(By.TAG_NAME, "a").text for row in rows] == chosen


THOUSAND_RUNS = Path(__file__).with_name("thousand_runs.js").read_text()


def test_list_of_1000_runs_takes_two_requests_and_searches_in_the_browser(chromium: Chrome, fleet: Service) -> None:
    added = chromium.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": THOUSAND_RUNS})
    try:
        open_list(chromium, fleet, sort="name")
        assert len(listed(chromium)) == 100
        assert chromium.execute_script("return window.requests") == 2
        elements = chromium.execute_script("return document.querySelectorAll('*').length")
        assert elements < 5000, "rows outside the first page are in the document"
        search(chromium, "00777")
        wait("the matching run is listed", lambda: listed(chromium) == ["fleet/00777"])
        assert chromium.execute_script("return window.requests") == 2, "a search sends no request"
    finally:
        chromium.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_run_description_is_shown_and_searchable_and_run_can_be_deleted(
    chromium: Chrome, service: Service, feeder: Feeder, complaints: Callable[[], list[str]]
) -> None:
    feeder.start()
    feeder.train(5)
    chromium.get(f"{service.url}/?{urlencode({'runs': feeder.run})}")
    wait("the page is open", lambda: button(chromium, "Name and notes")).click()
    description = {"display_name": "Hope and glory", "tags": "keep, second study,keep", "notes": "<b>two</b>\nlines"}
    fill(chromium, **description, who="Ada")
    button(chromium, "Save").click()
    wait("the display name is shown", lambda: text(chromium, "header.title h1") == "Hope and glory")
    assert feeder.run in text(chromium, "header.title .identity"), "the run name is still shown"
    assert [tag.text for tag in chromium.find_elements(By.CSS_SELECTOR, ".tags li")] == ["keep", "second study"]
    assert "<b>two</b>" in text(chromium, ".notes")
    wait("the button has the focus again", lambda: chromium.switch_to.active_element.text == "Name and notes")
    wait("the event is listed", lambda: "Ada (local) changed the run's display name" in text(chromium, ".events"))
    for query in ({"q": "glory"}, {"label": "second study"}, {"q": feeder.run}):
        open_list(chromium, service, **query)
        assert listed(chromium) == ["Hope and glory"], query

    chromium.get(f"{service.url}/?{urlencode({'runs': feeder.run})}")
    wait("the page is open", lambda: button(chromium, "Name and notes"))
    assert not chromium.find_elements(By.XPATH, "//button[.='Delete']"), "a training run must not be deletable"
    feeder.send(Finished(step=feeder.step, unix_seconds=time.time(), status="completed"))
    wait("the run has ended", lambda: button(chromium, "Delete")).click()
    fill(chromium, who="Ada", reason="a typing error")
    button(chromium, "Continue").click()
    wait("the dialog names the data before it is deleted", lambda: "with its 50 steps" in text(chromium, "dialog"))
    assert service.client.get(f"/v1/runs/{feeder.run}").status_code == 200
    button(chromium, "Delete now").click()
    wait("the list no longer contains the run", lambda: "Hope and glory" not in text(chromium, "main"))
    [row] = [r for r in service.client.get("/v1/audit").json()["rows"] if r["action"] == "deleted"][:1]
    assert (row["actor"], row["run"], row["details"]) == ("Ada (local)", feeder.run, {"reason": "a typing error"})

    deleted = Feeder(service.client, f"{feeder.run[:80]}-other")
    deleted.start()
    deleted.send(Finished(step=0, unix_seconds=time.time(), status="completed"))
    open_list(chromium, service, q=deleted.run)
    order = {"who": "Grace", "reason": "elsewhere"}
    service.client.delete(f"/v1/runs/{deleted.run}", params=order).raise_for_status()
    wait("an open list drops the deleted run", lambda: re.search("No (matching )?runs", text(chromium)))
    errors = [line for line in complaints() if "404" not in line]  # requests for the deleted run
    assert not errors, errors
