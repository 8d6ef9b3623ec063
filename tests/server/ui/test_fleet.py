"""A fleet on the page: found, filtered and sorted; every view without a barrier, and whole at any width."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select
from tests.server.ui.conftest import Feeder, Service
from tests.server.ui.reading import text, wait
from tests.server.ui.test_when_it_matters import OVERFLOW, open_at_size, see_at

from foreshock.contract.wire import Finished

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium.webdriver import Chrome

pytestmark = pytest.mark.servers
UI = Path(__file__).parents[3] / "src/foreshock/server" / "ui"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with a fleet of its own: 30 healthy runs, one warned, one that ended, three labels."""
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


def listed(chromium: Chrome) -> list[str]:
    """The names on the list, from the top."""
    script = "return [...document.querySelectorAll('tbody .run')].map(a => a.querySelector('[title]').title)"
    names: list[str] = chromium.execute_script(script)
    return names


def open_list(chromium: Chrome, service: Service, **asked: str) -> None:
    """Open the list of runs, asked for this."""
    chromium.get(f"{service.url}/?{urlencode(asked)}")
    wait("the list", lambda: listed(chromium))


def choose(chromium: Chrome, name: str, option: str) -> None:
    """Choose by a select's label."""
    Select(chromium.find_element(By.CSS_SELECTOR, f"select[aria-label='{name}']")).select_by_visible_text(option)


def search(chromium: Chrome, words: str) -> None:
    """Type into the search field."""
    field = chromium.find_element(By.CSS_SELECTOR, "input[type=search]")
    field.clear()
    field.send_keys(words)


def test_what_needs_a_person_comes_first_and_other_orders_can_be_chosen(chromium: Chrome, fleet: Service) -> None:
    open_list(chromium, fleet)
    names = listed(chromium)
    assert names[0] == "zz-failing"
    assert names[1] == "sweep/029"
    assert names[-1] == "a-done", "what has ended is last"
    assert text(chromium, "tbody .severity").endswith("warning")
    assert text(chromium, "select[aria-label='order'] option") == "What needs you first"
    choose(chromium, "order", "By name")
    assert listed(chromium)[:2] == ["a-done", "sweep/000"]


def test_runs_are_searched_by_words_in_names_and_labels(chromium: Chrome, fleet: Service) -> None:
    open_list(chromium, fleet)
    search(chromium, "02 SPEECH")
    wait("the found", lambda: len(listed(chromium)) == 5)
    assert set(listed(chromium)) == {f"sweep/02{digit}" for digit in (1, 3, 5, 7, 9)}, "in the order of risk"
    search(chromium, "nobody-is-called-so")
    wait("the word that none matches", lambda: "No run matches" in text(chromium, "main"))


def test_what_is_asked_for_stands_in_the_address_and_is_asked_again_there(chromium: Chrome, fleet: Service) -> None:
    open_list(chromium, fleet)
    choose(chromium, "state", "With a warning")
    assert listed(chromium) == ["zz-failing"]
    choose(chromium, "state", "Any state")
    choose(chromium, "label", "team=vision")
    choose(chromium, "order", "By name")
    search(chromium, "sweep/00")
    wait("the found", lambda: len(listed(chromium)) == 5)
    assert "5 of 32 match" in text(chromium, "main")
    chromium.get(chromium.current_url)
    wait("the same again", lambda: listed(chromium) == [f"sweep/00{number}" for number in (0, 2, 4, 6, 8)])
    open_list(chromium, fleet, state="ended")
    assert listed(chromium) == ["a-done"]
    open_list(chromium, fleet, risk="alarm", sort="nonsense")
    assert "zz-failing" in listed(chromium)
    assert "sweep/000" not in listed(chromium)


MANY = """
const fetched = window.fetch, runs = RUNS;
window.asked = 0;
window.fetch = async (...given) => {
  const asked = new URL(String(given[0]));
  if (!asked.pathname.endsWith("/v1/runs")) return fetched(...given);
  window.asked += 1;
  const from = Number(asked.searchParams.get("cursor") ?? 0);
  const [one] = (await (await fetched(new URL("v1/runs?limit=1", document.baseURI))).json()).runs;
  const length = Math.min(Number(asked.searchParams.get("limit")), runs - from);
  const name = (place) => `fleet/${String(place).padStart(5, "0")}`;
  const page = Array.from({ length }, (_, i) => ({ ...one, display_name: null, run: name(from + i) }));
  const next_cursor = from + length < runs ? String(from + length) : null;
  return new Response(JSON.stringify({ runs: page, next_cursor }), { status: 200 });
};
"""


@pytest.mark.parametrize("runs", [1000, pytest.param(5000, marks=pytest.mark.full)])
def test_a_fleet_takes_a_request_for_each_500_runs_a_hundred_rows_and_none_to_search(
    chromium: Chrome, fleet: Service, runs: int
) -> None:
    script = {"source": MANY.replace("RUNS", str(runs))}
    added = chromium.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)
    try:
        open_list(chromium, fleet, sort="name")
        assert len(listed(chromium)) == 100
        assert chromium.execute_script("return window.asked") == runs // 500
        elements = chromium.execute_script("return document.querySelectorAll('*').length")
        assert elements < 5000, "what is not shown is not drawn"
        search(chromium, "00777")
        wait("the one", lambda: listed(chromium) == ["fleet/00777"])
        assert chromium.execute_script("return window.asked") == runs // 500, "a search asks the service nothing"
    finally:
        chromium.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


# Nobody is kept out


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core in the version that package.json names."""
    own = UI / "node_modules" / "axe-core" / "axe.min.js"
    if not own.is_file():
        version = json.loads((UI / "package.json").read_text())["devDependencies"]["axe-core"]
        folder = tmp_path_factory.mktemp("axe")
        if shutil.which("npm") is None:
            _absent("npm is not here")
        fetch = ["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", f"axe-core@{version}"]
        done = subprocess.run(fetch, capture_output=True, text=True, timeout=240)
        if done.returncode:
            _absent(f"npm could not fetch axe-core: {done.stderr[-500:]}")
        own = folder / "node_modules" / "axe-core" / "axe.min.js"
    return own.read_text()


def _absent(why: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


def barriers(chromium: Chrome, axe: str, part: str = "html") -> list[str]:
    """What axe-core finds wrong with this part of the page as it stands."""
    chromium.execute_script(axe)
    chromium.set_script_timeout(60)
    found: list[dict[str, Any]] = chromium.execute_async_script(
        "const done = arguments[arguments.length - 1]; axe.run(arguments[0]).then(r => done(r.violations))",
        part,
    )
    return [f"{v['id']}: {v['help']}: {[node['html'][:160] for node in v['nodes'][:3]]}" for v in found]


@pytest.fixture(params=["light", pytest.param("dark", marks=pytest.mark.full)])
def themed(request: pytest.FixtureRequest, chromium: Chrome) -> Iterator[Chrome]:
    """The browser in either theme."""
    media = [{"name": "prefers-color-scheme", "value": request.param}]
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    yield chromium
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.full
@pytest.mark.parametrize("view", ["runs", "run", "comparison", "login"])
def test_axe_core_finds_no_barrier(
    themed: Chrome, fleet: Service, request: pytest.FixtureRequest, axe: str, view: str
) -> None:
    if view == "runs":
        open_list(themed, fleet)
    elif view == "login":
        guarded: Service = request.getfixturevalue("guarded")
        themed.get(guarded.url)
        wait("the login", lambda: themed.find_elements(By.CSS_SELECTOR, "input[type=password]"))
    else:
        open_at_size(themed, fleet, *(["zz-failing"] if view == "run" else ["zz-failing", "sweep/001"]))
    assert barriers(themed, axe) == []
    themed.get("about:blank")  # before the service goes that was asked for


NAMES = ("a" * 128, "-".join(["word"] * 25)[:124], "/".join("abcdefgh" * 15)[:124])
LABELS = {
    "note": "x" * 200,
    "direction": "נסיון תجربة " * 12,
    "markup": "<img src=x onerror=alert(1)>" + "<table><b>" * 16,
    "n" * 100: "short",
}


@pytest.mark.parametrize("width", [pytest.param(1440, marks=pytest.mark.full), 390])
def test_names_that_are_long_or_strange_break_no_card_on_any_screen(
    chromium: Chrome, service: Service, width: int
) -> None:
    runs = [f"{name[:120]}{width}" for name in NAMES]
    for run in runs:
        feeder = Feeder(service.client, run, layers=2, heads=2)
        feeder.start(labels=LABELS)
        feeder.train(3)
        feeder.warn("תجربة <b>" + "w" * 300)
    see_at(chromium, width, 6000)
    try:
        open_list(chromium, service, q=str(width))
        wait("the runs", lambda: len(listed(chromium)) >= len(runs))
        assert chromium.execute_script(OVERFLOW) == []
        for shown in (runs, runs[:1]):
            open_at_size(chromium, service, *shown)
            assert chromium.execute_script(OVERFLOW) == []
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
