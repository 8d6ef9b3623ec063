"""From the step that trips a detector to the page and to Alertmanager, and from an order to the kernel's mode.

Everything is real but the training's reason to fail: agent, sender, service, page in Chromium, Prometheus and
Alertmanager. The detectors trip when the test says so, since a natural drift takes minutes; tests/e2e waits for one.
"""

from __future__ import annotations

import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from selenium.webdriver.common.by import By
from tests.dashboards.shipped import alertmanager_config, prometheus_config
from tests.e2e.running import alertmanager as start_alertmanager
from tests.e2e.running import prometheus, starter
from tests.monitor.doubles import ScriptedDetectors, verdict
from tests.monitor.tiny_models import tiny_gpt, train_step
from tests.server.ui.reading import wait

from foreshock.contract import wire
from foreshock.dashboards.generate import GENERATED
from foreshock.monitor import attach
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE
from foreshock.monitor.config import AgentConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from selenium.webdriver import Chrome
    from tests.server.ui.conftest import Service

pytestmark = pytest.mark.servers
REPOSITORY = Path(__file__).parents[3]
RUN = "in-a-hurry"
INTERVAL_SECONDS = 2.0
"""Of Prometheus's scrapes and of its evaluations."""
HEADS = [(0, 0), (0, 1), (1, 0), (1, 1)]


class TripWire(ScriptedDetectors):
    """Detectors that warn about the next head when they are told to, and say when they did."""

    def __init__(self) -> None:
        super().__init__(len(HEADS))
        self.due: list[tuple[int, int]] = []
        self.tripped: dict[tuple[int, int], float] = {}

    def update(self, readings: Any) -> list[wire.Verdict]:
        raised = []
        while self.due:
            head = self.due.pop()
            self.tripped[head] = time.time()
            raised.append(verdict(*head, step=readings.step))
        return raised


class Training:
    """A small model that trains in a thread, watched by a real agent under its default pace; 50 steps a second."""

    def __init__(self, url: str) -> None:
        self.model = tiny_gpt()
        self.agent = attach(self.model, run=RUN, url=url, policy="approve", quiet=True)
        self.agent.detectors = self.detectors = TripWire()
        self.switched: dict[tuple[int, int], float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        step = 0
        while not self._over.wait(0.02):
            step += 1
            self.agent.step(train_step(self.model, optimizer, step))
            for layer, head in HEADS:  # what the kernel reads
                modes = self.model.blocks[layer].__dict__[LAYER_ATTRIBUTE].modes
                if int(modes[head]) and (layer, head) not in self.switched:
                    self.switched[layer, head] = time.time()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.agent.close()


@pytest.fixture
def alertmanager(service: Service, tmp_path: Path) -> Iterator[str]:
    """The Alertmanager that a Prometheus calls which scrapes the service; the shipped rules."""
    hook = f"{service.url}/v1/webhooks/alertmanager"
    often = f"{INTERVAL_SECONDS:g}s"
    with starter(tmp_path) as start:
        called = start_alertmanager(start, tmp_path, alertmanager_config(hook, None, group_wait="100ms"))
        target, rules = service.url.removeprefix("http://"), REPOSITORY / GENERATED / "prometheus-rules.yml"
        config = prometheus_config(target, rules, called.address, scrape_interval=often, evaluation_interval=often)
        up = f"{prometheus(start, tmp_path, config).url}/api/v1/query?query=up"
        wait("Prometheus scrapes", lambda: httpx.get(up, trust_env=False).json()["data"]["result"])
        yield called.url


def _alerts(url: str, query: dict[str, list[str]]) -> list[Any]:
    found: list[Any] = httpx.get(f"{url}/api/v2/alerts", params=query, trust_env=False).json()
    return found


def _seen(chromium: Chrome, name: str) -> float | None:
    seen: dict[str, float] = chromium.execute_script("return window.seen")
    return seen.get(name)


WATCH = """
window.seen = {};
new MutationObserver(() => {
  const said = document.querySelector("section[aria-label=Warnings]")?.textContent ?? "";
  const many = said.match(/ · (\\d+) heads/);  // one card for all heads of a cause: it says how many
  if (many || said.includes("layer")) window.seen[many ? many[1] : "1"] ??= Date.now() / 1000;
}).observe(document.body, { childList: true, subtree: true, characterData: true });
"""


@pytest.mark.full
@pytest.mark.promise("S11")
def test_a_warning_is_on_the_page_within_two_seconds_and_an_order_in_the_kernel_within_two_flushes(
    chromium: Chrome, service: Service, alertmanager: str, record_property: Callable[[str, object], None]
) -> None:
    training = Training(service.url)
    try:
        wait("the run appears", lambda: service.client.get(f"/v1/runs/{RUN}").status_code == 200)
        chromium.get(f"{service.url}/?runs={RUN}")
        wait("the page is live", lambda: chromium.find_element(By.CSS_SELECTOR, ".connection").text == "live")
        wait("the page is drawn", lambda: chromium.find_elements(By.CSS_SELECTOR, ".chart .u-wrap"))
        chromium.execute_script(WATCH)

        seen: dict[tuple[int, int], float] = {}
        alerted: dict[tuple[int, int], float] = {}
        for count, head in enumerate(HEADS, start=1):
            training.detectors.due.append(head)
            name = str(count)
            wait("it is on the page", partial(_seen, chromium, name))
            if not alerted:  # the heads of one cause are one incident, and one alert
                asked = {"filter": ['alertname="ForeshockHeadFailing"', f'run="{RUN}"']}
                wait("Alertmanager has it", partial(_alerts, alertmanager, asked))
                alerted[head] = time.time()
            seen[head] = chromium.execute_script("return window.seen")[name]

        ordered: dict[tuple[int, int], float] = {}
        for head in HEADS:
            order = {"who": "test", "reason": "how fast", "heads": [head], "mode": "exact_delta"}
            ordered[head] = time.time()
            service.client.post(f"/v1/runs/{RUN}/commands", json=order).raise_for_status()
            wait("the kernel reads the new mode", partial(training.switched.get, head))
        tripped, switched = training.detectors.tripped, training.switched
    finally:
        training.close()

    flush = AgentConfig.send_every_seconds
    figures = {
        "seconds from the tripping step to the page": [seen[h] - tripped[h] for h in HEADS],
        "seconds from the tripping step to Alertmanager": [moment - tripped[h] for h, moment in alerted.items()],
        "agent flushes from an order to the kernel": [(switched[h] - ordered[h]) / flush for h in HEADS],
    }
    for name, values in figures.items():
        record_property(name, [round(value, 3) for value in values])
    to_page, to_alertmanager, to_kernel = (statistics.median(values) for values in figures.values())
    assert to_page < 2.0
    assert to_kernel < 2.0
    # One scrape and one evaluation; before them the agent's flush and the service's snapshot of /metrics, a second old.
    assert to_alertmanager < 2 * INTERVAL_SECONDS + flush + 1.0
