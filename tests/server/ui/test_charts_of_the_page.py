"""What charts and heat map draw, and what they say was not measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tests.server.ui.reading import MINUS, button, open_run, text, tile, wait

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from tests.server.ui.conftest import Feeder, Service
pytestmark = pytest.mark.servers


@pytest.mark.full
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


def test_several_runs_are_drawn_on_the_same_charts(chromium: Chrome, service: Service, feeder: Feeder) -> None:
    drifts = {"a": 0.5, "b": 0.0}
    others = [type(feeder)(service.client, f"{feeder.run}-{variant}", drift=drift) for variant, drift in drifts.items()]
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
