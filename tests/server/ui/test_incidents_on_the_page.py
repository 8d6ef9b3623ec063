"""What a run's page shows of a flood: one card that names where to look first, its heads on demand, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tests.server.ui.conftest import Feeder, Service
from tests.server.ui.reading import button, open_run, text, wait, warn_about

from foreshock.contract.wire import Checkpoint

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.servers


def test_a_flood_of_144_heads_is_one_card_that_is_switched_acknowledged_and_resumed_from(
    chromium: Chrome, service: Service
) -> None:
    feeder = Feeder(service.client, "one-card", layers=12, heads=12)
    feeder.start()
    feeder.train(40)
    feeder.send(Checkpoint(step=40, path="out/<b>checkpoint-40", trainer="transformers"))
    feeder.send(*(warn_about(feeder, i // 12, i % 12, forecast_steps=5000.0 - 10 * i) for i in range(144)))
    feeder.send(Checkpoint(step=420, path="out/checkpoint-420", trainer="transformers", requested=True))
    open_run(chromium, service, feeder.run)
    wait("the incident is there", lambda: "144 heads of layers 0 to 11" in text(chromium, ".warnings"))
    assert len(chromium.find_elements(By.CSS_SELECTOR, ".warnings")) == 1
    assert "of layer 11 head 11 until the largest" in text(chromium, ".warnings")
    assert "Switch every head to row_corrected." in text(chromium, ".warnings .to-do")
    wait("its course is drawn", lambda: chromium.find_elements(By.CSS_SELECTOR, ".warnings .sparkline polyline"))
    buttons = [one.text for one in chromium.find_elements(By.CSS_SELECTOR, ".warnings footer button")]
    assert buttons == ["Switch every head", "Show this head", "Switch this head", "Acknowledge"]
    assert not chromium.find_elements(By.CSS_SELECTOR, ".warnings .layer")
    chromium.find_element(By.XPATH, "//summary[contains(., 'fewest steps left first')]").click()
    layers = wait("its layers", lambda: chromium.find_elements(By.CSS_SELECTOR, ".warnings .layer > summary"))
    assert len(layers) == 12
    assert layers[0].text.startswith("layer 11: 12 heads, about 3,600")
    layers[0].click()
    first = wait("its heads", lambda: chromium.find_elements(By.CSS_SELECTOR, ".warnings .layer li"))[0]
    assert first.text.startswith("layer 11 head 11")

    chromium.find_element(By.XPATH, "//summary[.='Resume plan']").click()
    lines = wait("the lines to type", lambda: text(chromium, ".warnings .resume pre").splitlines())
    assert lines[0] == 'trainer.train(resume_from_checkpoint="out/<b>checkpoint-40")'
    assert lines[1].startswith(f"foreshock switch {feeder.run} --mode row_corrected ")
    known = [one.text for one in chromium.find_elements(By.CSS_SELECTOR, ".warnings .resume li")]
    assert known == ["step 420: after a warning out/checkpoint-420", "step 40: clean, keep out/<b>checkpoint-40"]

    chromium.execute_script("localStorage.removeItem('foreshock.who')")
    button(chromium, "Acknowledge").send_keys(Keys.ENTER)
    wait("the keyboard is in the field", lambda: chromium.switch_to.active_element.tag_name == "input")
    chromium.switch_to.active_element.send_keys(Keys.CONTROL, "a")  # no field is named: the keyboard is enough
    chromium.switch_to.active_element.send_keys("Ada", Keys.ENTER)
    wait("it is seen", lambda: "acknowledged by Ada" in text(chromium, ".warnings header"))
    assert not chromium.find_elements(By.XPATH, "//button[.='Acknowledge']")
    button(chromium, "Switch every head").click()
    wait("the dialog names every head", lambda: "every head" in text(chromium, "dialog"))


def test_a_drift_with_scores_that_grow_is_one_card_that_asks_for_the_switch(
    chromium: Chrome, service: Service, feeder: Feeder
) -> None:
    feeder.start(qk_clip="never")
    feeder.train(5)
    grows = warn_about(feeder, 0, 1, cause="score growth", signal="score", sentence="Layer 0 head 1 grows.")
    feeder.send(warn_about(feeder, 0, 2), grows)
    open_run(chromium, service, feeder.run)
    wait("both causes", lambda: "rounding and score growth · 2 heads" in text(chromium, ".warnings header"))
    assert len(chromium.find_elements(By.CSS_SELECTOR, ".warnings")) == 1
    buttons = [one.text for one in chromium.find_elements(By.CSS_SELECTOR, ".warnings footer button")]
    assert buttons == ["Switch every head", "Show this head", "Acknowledge"], "the first head grows: no switch of it"
    chromium.find_element(By.XPATH, "//summary[contains(., 'fewest steps left first')]").click()
    wait("its layer", lambda: chromium.find_elements(By.CSS_SELECTOR, ".warnings .layer > summary"))[0].click()
    heads = [one.text for one in chromium.find_elements(By.CSS_SELECTOR, ".warnings li .muted")]
    assert [one.split(" · ")[-1] for one in heads] == ["score growth", "rounding"]
    assert [one.text for one in chromium.find_elements(By.CSS_SELECTOR, ".warnings li button")] == [
        "Show", "Show", "Switch",
    ]  # fmt: skip
