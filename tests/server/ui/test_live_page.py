"""The live page in a real Chromium, fed by a real service: a run appears, moves, warns, is switched."""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode

import numpy as np
import pytest
from PIL import Image
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from foreshock.contract.modes import MODES

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement
    from tests.server.ui.conftest import Feeder, Service

pytestmark = pytest.mark.servers
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


def test_a_run_appears_moves_warns_and_is_switched(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    chromium.get(service.url)
    wait("the stream is open", lambda: text(chromium, ".connection") == "live")

    feeder.start()
    feeder.train(5)
    row = wait("the run appears in the list", lambda: chromium.find_element(By.LINK_TEXT, feeder.run))
    row.click()
    wait("its page opens", lambda: tile(chromium, "Step") == "50")
    feeder.train(60)
    wait("it moves", lambda: tile(chromium, "Step") == "650")
    assert "No active warning" in text(chromium)

    feeder.warn()  # how fast it travels is measured by test_how_fast_a_warning_travels.py
    wait("it warns", lambda: "its score offset left its peers" in text(chromium, ".warnings"))
    assert "about 2,100 (1,400 to 3,100)" in text(chromium, ".warnings")
    assert f"{MINUS}6.25" in text(chromium, ".evidence")
    assert tile(chromium, "Steps left") == "about 2,100"

    button(chromium, "Switch this head").click()
    chromium.find_element(By.NAME, "who").send_keys("Ada")
    chromium.find_element(By.NAME, "reason").send_keys("the offset grows")
    button(chromium, "Continue").click()
    sentence = f"Switch layer 0 head 2 of {feeder.run} to exact delta."
    wait("the order is said in words before it goes", lambda: sentence in text(chromium, "dialog"))
    assert not feeder.obey()
    button(chromium, "Switch now").click()
    wait("the order stands on the page", lambda: "the offset grows" in text(chromium, ".commands"))
    assert feeder.obey() == ["exact_delta"]
    wait("the agent's answer stands on the page", lambda: "applied" in text(chromium, ".commands .state"))
    feeder.train(3)
    wait("the mode is shown", lambda: tile(chromium, "Switched heads").startswith("1 of 8"))
    wait("it is told in the history", lambda: "exact_delta: applied" in text(chromium, ".events"))

    feeder.train(40)
    verified = "growth stopped"
    wait("it is verified", lambda: verified in text(chromium, ".commands .verification"))
    wait("in words", lambda: "verified, the growth has stopped" in text(chromium, ".events"))

    button(chromium, "Undo").click()
    chromium.find_element(By.NAME, "reason").send_keys("enough seen")
    button(chromium, "Continue").click()
    sentence = f"Undo the switch of layer 0 head 2 of {feeder.run} to exact delta"
    wait("what is undone is said before it goes", lambda: sentence in text(chromium, "dialog"))
    button(chromium, "Undo now").click()
    wait("the undo stands on the page", lambda: "undo: enough seen" in text(chromium, ".commands"))
    assert feeder.obey() == ["plain"]
    feeder.train(1)
    wait("the mode is plain again", lambda: tile(chromium, "Switched heads") == "none")
    wait("the switch is marked", lambda: "undone" in text(chromium, ".commands li:nth-child(2)"))
    assert not chromium.find_elements(By.XPATH, "//button[.='Undo']"), "an undone switch can be undone again"

    chromium.find_element(By.XPATH, "//summary[.='Audit trail']").click()
    wait("the audit trail names who and why", lambda: "Ada" in text(chromium, "section[aria-label=History] table"))


def test_an_order_may_join_modes_and_one_takes_the_place_of_what_it_excludes(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start()
    feeder.train(5)
    open_run(chromium, service, feeder.run)
    button(chromium, "New order").click()
    offered = [box.get_attribute("value") for box in chromium.find_elements(By.NAME, "mode")]
    assert offered == [mode.name for mode in MODES if mode.served]

    def chosen(*toggled: str) -> str:
        for name in toggled:
            chromium.find_element(By.CSS_SELECTOR, f"input[name=mode][value={name}]").click()
        return chromium.find_element(By.XPATH, "//legend[starts-with(., 'Mode')]").text

    assert chosen() == "Mode: exact delta"
    assert chosen("stable_softmax") == "Mode: exact delta + stable softmax"
    assert chosen("paper_softmax") == "Mode: exact delta + paper softmax"
    assert chosen("exact_delta", "paper_softmax") == "Mode: plain"
    chosen("stable_softmax", "exact_delta")
    chromium.find_element(By.NAME, "who").send_keys("Ada")
    chromium.find_element(By.NAME, "reason").send_keys("a try")
    button(chromium, "Continue").click()
    button(chromium, "Switch now").click()
    wait("the order stands on the page", lambda: "exact delta + stable softmax" in text(chromium, ".commands"))
    assert feeder.obey() == ["exact_delta+stable_softmax"]


def test_a_switch_that_the_agent_proposes_waits_for_approval_with_a_reason(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start(policy="approve")
    feeder.train(5)
    open_run(chromium, service, feeder.run)
    feeder.warn()
    feeder.propose()
    wait("the proposal is shown", lambda: text(chromium, ".command .state") == "proposed")
    assert not feeder.obey()
    button(chromium, "Approve").click()
    button(chromium, "Continue").click()
    assert chromium.find_elements(By.CSS_SELECTOR, "dialog input:invalid"), "an approval went on without a reason"
    chromium.find_element(By.NAME, "who").send_keys("Grace")
    chromium.find_element(By.NAME, "reason").send_keys("agreed")
    button(chromium, "Continue").click()
    button(chromium, "Approve now").click()
    wait("it is approved", lambda: text(chromium, ".command .state") == "pending")
    assert feeder.obey() == ["exact_delta"]
    wait("it is applied", lambda: text(chromium, ".command .state") == "applied")
    feeder.train(1)
    wait("the warning says so", lambda: "now exact delta" in text(chromium, ".warnings"))


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
    assert own.obey() == ["exact_delta"]
    assert all("401" in line for line in complaints())  # the wrong token, in the browser's own words
    chromium.get("about:blank")


def test_5120_heads_are_scrubbed_with_one_question_at_a_time(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    """However fast the hand: a step is drawn with every frame of the screen, and asked for when none is under way."""
    wide = type(feeder)(service.client, feeder.run, layers=80, heads=64)
    wide.start()
    for _ in range(4):
        wide.train(10)
    open_run(chromium, service, wide.run)
    wait("the scrubber", lambda: chromium.find_element(By.CSS_SELECTOR, ".scrub input"))
    drawn, most, asked = chromium.execute_async_script(
        """
        const done = arguments[0], input = document.querySelector(".scrub input"), fetched = window.fetch;
        let frame = 0, under = 0, most = 0, asked = 0, drawn = 0;
        window.fetch = async (...given) => {
          if (!String(given[0]).includes("/matrix")) return fetched(...given);
          asked += 1;
          most = Math.max(most, ++under);
          try { return await fetched(...given); } finally { under -= 1; }
        };
        const turn = () => {
          if (frame === 60) return done([drawn, most, asked]);
          input.value = frame++ % 40;
          input.dispatchEvent(new Event("input", { bubbles: true }));
          requestAnimationFrame(() => {
            drawn += document.querySelector(".scrub output").textContent !== "not recorded";
            turn();
          });
        };
        turn();
        """
    )
    assert drawn == 60
    assert most <= 1
    assert asked <= 40


def test_what_was_not_recorded_is_said_and_never_shown_as_zero(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.recorded = frozenset({"states"})
    feeder.start()
    feeder.train(20)
    open_run(chromium, service, feeder.run)
    assert tile(chromium, "Loss") == "not recorded"
    assert tile(chromium, "Risk") == "not recorded"
    charts = {
        chart.find_element(By.TAG_NAME, "h3").text: chart.text
        for chart in chromium.find_elements(By.CSS_SELECTOR, ".chart")
    }
    for title in ("Loss", "Gradient norm", "Risk", "Spectral norm of W_Q"):
        assert "not recorded" in charts[title]
    assert "not recorded" not in charts["Score offset"]


def test_what_is_measured_now_and_then_is_drawn_as_a_line_and_what_stopped_being_measured_is_said(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    def spectral_norm() -> tuple[str, int]:
        """The newest value of the chosen head, and how many pixels of the chart have its colour."""
        open_run(chromium, service, feeder.run)
        chart = chromium.find_element(By.XPATH, "//figure[.//h3='Spectral norm of W_Q']")
        pixels: int = chromium.execute_script(
            """
            const {data} = ((c) => c.getContext("2d").getImageData(0, 0, c.width, c.height))(arguments[0]);
            const vermilion = (_, i) => data[4 * i] === 213 && data[4 * i + 1] === 94 && data[4 * i + 2] === 0;
            return Array.from({length: data.length / 4}, vermilion).filter(Boolean).length;
            """,
            chart.find_element(By.TAG_NAME, "canvas"),
        )
        return chart.find_element(By.CSS_SELECTOR, ".legend output").text, pixels

    feeder.start()
    feeder.train(60)
    value, pixels = spectral_norm()
    assert float(value) == pytest.approx(14, abs=0.2)  # 7 + 1 + the drift of 6, with noise of 0.03
    assert pixels > 200
    feeder.recorded -= {"norms"}
    feeder.train(60)
    assert spectral_norm()[0] == "not recorded"


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


def test_several_runs_are_drawn_on_the_same_charts(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    drifts = {"a": 0.5, "b": 0.0}
    others = [type(feeder)(service.client, f"{feeder.run}-{arm}", drift=drift) for arm, drift in drifts.items()]
    for each in (feeder, *others):
        each.start()
        each.train(30)
    names = [feeder.run, *(other.run for other in others)]
    open_run(chromium, service, *names)
    first = chromium.find_element(By.CSS_SELECTOR, ".chart .legend")
    assert [item.text for item in first.find_elements(By.CSS_SELECTOR, ".name")] == names
    rows = chromium.find_elements(By.CSS_SELECTOR, ".summary tbody tr")
    assert [row.find_element(By.TAG_NAME, "a").text for row in rows] == names

    chromium.get(service.url)
    for name in names[:2]:
        wait("the list", lambda n=name: chromium.find_element(By.CSS_SELECTOR, f"[aria-label='compare {n}']")).click()  # type: ignore[misc]
    button(chromium, "Compare 2 runs").click()
    wait("the chosen ones are compared", lambda: "Comparing 2 runs" in text(chromium, ".crumbs"))
    assert chromium.current_url.endswith(f"?runs={names[0]},{names[1]}")


def test_the_heat_map_scrubs_through_time_and_chooses_a_head_by_keyboard(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start()
    feeder.train(40)
    open_run(chromium, service, feeder.run)
    scrubber = wait("the heat map", lambda: chromium.find_element(By.CSS_SELECTOR, ".scrub input"))
    assert text(chromium, ".scrub output") == "400"
    scrubber.send_keys(Keys.HOME)
    wait("the first step is shown", lambda: text(chromium, ".scrub output") == "10")
    reading = text(chromium, ".reading")
    assert reading.startswith(f"layer 0 head 2: {MINUS}1.")
    scrubber.send_keys(Keys.END)
    wait("the last step is shown", lambda: text(chromium, ".reading").startswith(f"layer 0 head 2: {MINUS}5"))
    canvas = chromium.find_element(By.CSS_SELECTOR, ".heatmap canvas[tabindex]")
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    wait("the next head is chosen", lambda: text(chromium, ".reading").startswith("layer 1 head 3"))
    wait("and plotted", lambda: "layer 1 head 3" in text(chromium, ".chart .legend"))


def test_the_page_fits_a_phone(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    feeder.start(labels={"model": "a-rather-long-name-of-a-model-that-has-to-wrap-somewhere-on-a-narrow-screen"})
    feeder.train(20)
    feeder.warn()
    chromium.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        for address in ("/", f"/?runs={feeder.run}"):
            chromium.get(service.url + address)
            wait("the run is shown", lambda: feeder.run in text(chromium))
            if "runs" in address:
                signals = wait("the signals", lambda: chromium.find_element(By.ID, "signals"))
                chromium.execute_script("arguments[0].scrollIntoView()", signals)
                wait("the charts", lambda: chromium.find_elements(By.CSS_SELECTOR, ".u-wrap"))
            wide = chromium.execute_script(
                "return document.scrollingElement.scrollWidth > innerWidth || innerWidth !== 390"
            )
            assert not wide, f"{address} is wider than the phone"
        chart = chromium.find_element(By.CSS_SELECTOR, ".chart")
        assert 300 < chart.size["width"] <= 390
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_theme_follows_the_system_until_it_is_chosen(chromium: Chrome, service: Service) -> None:
    def background(scheme: str) -> str:
        chromium.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        color: str = chromium.execute_script("return getComputedStyle(document.body).backgroundColor")
        return color

    chromium.get(service.url)
    wait("the page", lambda: button(chromium, "Dark"))
    light, dark = background("light"), background("dark")
    assert light != dark
    # The page may not listen yet when the system changes its mind for the first time.
    wait("the page follows", lambda: background("light") and background("dark") and button(chromium, "Light"))
    chromium.find_element(By.TAG_NAME, "body").send_keys("t")
    wait("the choice holds", lambda: background("dark") == light)
    chromium.execute_script("localStorage.clear()")
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


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


def test_a_page_whose_first_question_fails_asks_again(
    chromium: Chrome, service: Service, feeder: Feeder, complaints: Callable[[], list[str]]
) -> None:
    feeder.start()
    feeder.train(5)
    chromium.execute_cdp_cmd("Network.enable", {})
    chromium.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*v1/session", "*v1/catalog"]})
    try:
        chromium.get(f"{service.url}/?runs={feeder.run}")
        wait("the failure is said", lambda: "cannot be reached" in text(chromium, ".note.error"))
    finally:
        chromium.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    wait("the run is shown after all", lambda: tile(chromium, "Step") == "50")
    wait("its charts are drawn", lambda: chromium.find_elements(By.CSS_SELECTOR, ".chart .u-wrap"))
    assert not chromium.find_elements(By.CSS_SELECTOR, ".note.error")
    refused = complaints()
    assert all("ERR_BLOCKED" in line for line in refused), refused


@pytest.mark.full
def test_runs_side_by_side_can_be_told_apart_with_every_kind_of_eye(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    runs = [type(feeder)(service.client, f"{feeder.run[:60]}-{number}") for number in range(6)]
    for each in runs:
        each.start()
        each.train(2)
    open_run(chromium, service, *(each.run for each in runs))
    swatches = chromium.find_elements(By.CSS_SELECTOR, ".summary .swatch")
    assert len(swatches) == 6
    try:
        for scheme in ("light", "dark"):
            wanted = {"name": "prefers-color-scheme", "value": scheme}
            chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [wanted]})
            for eyes in ("none", "protanopia", "deuteranopia", "tritanopia"):
                chromium.execute_cdp_cmd("Emulation.setEmulatedVisionDeficiency", {"type": eyes})
                colours = [middle(swatch.screenshot_as_png) for swatch in swatches]
                for one, other in itertools.combinations(colours, 2):
                    distance = np.linalg.norm(one - other)  # of at most 442
                    assert distance > 40, f"{eyes}, {scheme}: {one} and {other} look alike"
    finally:
        chromium.execute_cdp_cmd("Emulation.setEmulatedVisionDeficiency", {"type": "none"})
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def middle(picture: bytes) -> np.ndarray[Any, Any]:
    """The colour in the middle of a picture, RGB."""
    with Image.open(io.BytesIO(picture)) as image:
        return np.array(image.convert("RGB").getpixel((image.width // 2, image.height // 2)), dtype=np.float64)


def test_a_lost_connection_is_said_and_what_was_missed_comes_after_it(
    chromium: Chrome, service: Service, feeder: Feeder, complaints: Callable[[], list[str]]
) -> None:
    feeder.start()
    feeder.train(5)
    open_run(chromium, service, feeder.run)
    wait("the stream is open", lambda: text(chromium, ".connection") == "live")
    canvas = wait("the heat map", lambda: chromium.find_element(By.CSS_SELECTOR, ".heatmap canvas[tabindex]"))
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    service.stop()
    wait("the loss is said", lambda: "connection lost" in text(chromium, ".connection"))
    service.start()
    feeder.train(20)
    feeder.warn()
    wait("the page is live again", lambda: text(chromium, ".connection") == "live")
    wait("the warning is there", lambda: "its score offset left its peers" in text(chromium, ".warnings"))
    wait("the step is there", lambda: tile(chromium, "Step") == "250")
    assert "layer 1 head 3" in text(chromium, ".reading"), "the reader's choice of a head was lost with the connection"
    refused = complaints()  # the browser's own lines, which the page cannot keep off the console
    # A service that is stopping answers 503 to what it still accepts; after it no connection is made.
    assert all("ERR_" in line or "status of 503" in line for line in refused), refused
