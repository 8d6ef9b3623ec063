"""What an alert opens: its link, as a real Prometheus and Alertmanager deliver it, leads to the place on the page."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tests.dashboards.shipped import TEMPLATES, Receivers, alertmanager_config, prometheus_config
from tests.dashboards.test_alertmanager import World, outside
from tests.e2e.running import alertmanager, eventually, prometheus, starter
from tests.server.ui.conftest import Feeder, Service
from tests.server.ui.reading import text, wait, warn_about

from foreshock.dashboards.rules import Links, prometheus_rules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium.webdriver import Chrome

pytestmark = [pytest.mark.servers, pytest.mark.full]
REPOSITORY = Path(__file__).parents[3]
DRIFTS, DIVES = "team/sweep:7", "team/dives.2"


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, str]]]:
    """Title and link of the alert about each run, as a receiver of people got them."""
    folder = tmp_path_factory.mktemp("links")
    world = World()
    with ExitStack() as running:
        service = Service(folder)
        running.callback(service.close)
        for run in (DRIFTS, DIVES):
            feeder = Feeder(service.client, run, layers=3, heads=5)
            feeder.start()
            feeder.train(70, every=100)
            if run == DRIFTS:
                feeder.send(warn_about(feeder, 1, 0), warn_about(feeder, 2, 4, forecast_steps=90.0))
            else:
                nan = warn_about(feeder, 0, 0, cause="other", signal="nonfinite", severity="critical")
                nowhere = ("layer", "head", "forecast_steps", "forecast_low_steps")
                feeder.send(nan.model_copy(update=dict.fromkeys(nowhere)))
            feeder.train(3, every=100)
        here = running.enter_context(outside(world))
        (folder / "rules.yml").write_text(yaml.safe_dump(prometheus_rules(Links(service=service.url))))
        receivers = Receivers(webhook=f"http://{here}/people", slack=f"http://{here}/slack")
        start = running.enter_context(starter(folder))
        hook = f"{service.url}/v1/webhooks/alertmanager"
        pace: dict[str, Any] = {"group_wait": "500ms", "group_interval": "1s"}
        config = alertmanager_config(hook, None, templates=TEMPLATES, receivers=receivers, **pace)
        called = alertmanager(start, folder, config).address
        scraped, often = service.url.removeprefix("http://"), "500ms"
        prometheus(
            start,
            folder,
            prometheus_config(scraped, folder / "rules.yml", called, scrape_interval=often, evaluation_interval=often),
        )
        eventually("both alerts", lambda: len(world.alerts("/people")) == 2 and len(world.to("/slack")) == 2)
        told = [alert for body in world.to("/people") for alert in body["alerts"]]
        found = {a["labels"]["run"]: (a["annotations"]["summary"], a["annotations"]["page_url"]) for a in told}
        for message in (body["attachments"][0]["text"] for body in world.to("/slack")):
            assert any(f"Evidence and switch: {link}" in message for _, link in found.values()), message
        yield found


def asked(link: str) -> dict[str, list[str]]:
    """What an address asks for."""
    return parse_qs(urlsplit(link).query)


def first_step(chromium: Chrome) -> str:
    """What the first chart says of its first step."""
    chromium.find_element(By.CSS_SELECTOR, ".chart .plot").send_keys(Keys.HOME)
    return text(chromium, ".chart .at")


def test_the_alert_of_a_head_opens_its_run_its_measure_and_the_steps_from_before_it(
    chromium: Chrome, links: dict[str, tuple[str, str]]
) -> None:
    said, link = links[DRIFTS]
    assert said == f"Run {DRIFTS}: attention becomes unstable in layer 2 head 4 and layer 1 head 0 (rounding)"
    place = {"runs": [DRIFTS], "head": ["2.4"], "metric": ["head.score_offset"], "steps": ["6000-"]}
    assert asked(link) == place
    chromium.get(link)
    wait("its charts", lambda: "layer 2 head 4" in text(chromium, ".chart .legend"))
    assert text(chromium, "header.title h1") == DRIFTS
    assert text(chromium, ".chart h3") == "Score offset"
    wait("it begins where the link says", lambda: first_step(chromium) in ("step 6,000", "step 6,100"))
    assert asked(chromium.current_url) == place, "to look changes nothing"
