"""A real service, Prometheus and Alertmanager under the generated configuration.

A simulated run sends samples and a warning, and answers commands. Every query of every board must return data, every
rule must load, and the warning must return to the run as a switch. The test in tests/e2e does the same with a real
training run.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from tests.dashboards.promql import Query, concrete, queries
from tests.dashboards.shipped import alertmanager_config, prometheus_config
from tests.e2e.running import alertmanager, eventually, prometheus, starter
from tests.server.answering_agent import AnsweringAgent

from foreshock.contract.slots import Slot
from foreshock.contract.wire import AgentHealth, Array, Clipped, Event
from foreshock.dashboards.rules import Links, alerts, prometheus_rules
from foreshock.server.settings import Token
from foreshock.server.testing import FakeRank, LiveService

pytestmark = pytest.mark.servers

RUN = "a.b/c-1"  # a dot and a slash: both mean something in patterns and addresses
TOKENS = {"agent": "agent-of-the-test", "prometheus": "scraper-of-the-test", "alertmanager": "alerts-of-the-test"}
SCOPES: dict[str, Any] = {"agent": ("ingest",), "prometheus": ("read",), "alertmanager": ("act",)}


class Training(AnsweringAgent):
    """Raises a warning and reports every measured value."""

    def first(self) -> list[Event]:
        warned = self._rank.verdict(
            1, corrected_from="score growth", corrected_step=1
        )  # fields that a board also shows
        return [self._rank.started(policy="auto"), warned]

    def events(self, step: int, modes: Array) -> list[Event]:
        """A sample with every measured value, a QK-Clip event, and agent health with a dropped event and a fault."""
        norms = Array.of(np.full(self._rank.count, 1.5, dtype=np.float32))
        names = ["clip_factor", "clipped_steps"]
        names += ["query_norm", "key_norm", "query_key_norm"] * (step % 4 == 1)  # measured only at some steps
        words = self._rank.words(step)
        words[:, [Slot.ENTROPY_ROWS, Slot.CHECKED_ROWS]] = 10
        words.view(np.float64)[:, [Slot.ENTROPY_SUM, Slot.OUTPUT_ERROR_MAX, Slot.GRADIENT_ERROR_MAX]] = 30.0
        known = {"modes": modes, "states": Array.of(words), **dict.fromkeys(names, norms)}
        scaled: dict[str, Any] = {"heads": ((0, 0),), "factors": (0.5,), "times": (1,), "total": step, "reason": "told"}
        lost = AgentHealth(step=step, dropped={"queue_full": 1}, faults={"collector": 1})
        sample = self._rank.sample(step).model_copy(update=known)
        return [sample, Clipped(id=f"clip-{step}", step=step, on=True, **scaled), lost]


@dataclass(frozen=True)
class Stack:
    """The running Prometheus, and queries to it."""

    prometheus: str

    def value(self, expr: str) -> float:
        """The value of a query with one series; 0 if the result is empty."""
        answer = httpx.get(f"{self.prometheus}/api/v1/query", params={"query": expr}).raise_for_status()
        return sum(float(series["value"][1]) for series in answer.json()["data"]["result"])

    def error_of(self, query: Query) -> str:
        """Why a query returned no data in the last 20 seconds; empty if it returned data."""
        expr = concrete(query.expr, run=RUN, rate_interval="4s")
        parameters = {"query": f"count_over_time(({expr})[20s:1s])"}
        answer = httpx.post(f"{self.prometheus}/api/v1/query", data=parameters, timeout=30).json()
        return str(answer.get("error", "")) or ("" if answer["data"]["result"] else "empty")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    tokens = [Token.of(name, TOKENS[name], SCOPES[name]).model_dump() for name in TOKENS]
    (secrets := folder / "secrets").mkdir()
    for name, token in TOKENS.items():
        (secrets / name).write_text(token)
    with (
        LiveService(folder, {"FORESHOCK_TOKENS": json.dumps(tokens)}) as service,
        starter(folder) as start,
        Training(service, FakeRank(run=RUN), token=TOKENS["agent"]),
    ):
        (folder / "rules.yml").write_text(yaml.safe_dump(prometheus_rules(Links())))
        hook = f"{service.url}/v1/webhooks/alertmanager"
        waits: dict[str, Any] = {"group_wait": "100ms", "group_interval": "1s"}
        config = alertmanager_config(hook, secrets / "alertmanager", watchdog_interval="1s", **waits)
        manager = alertmanager(start, folder, config)
        config = prometheus_config(
            service.url.removeprefix("http://"),
            folder / "rules.yml",
            manager.address,
            scrape_interval="500ms",
            evaluation_interval="500ms",
            token_file=secrets / "prometheus",
        )
        found = Stack(prometheus(start, folder, config).url)
        eventually("a scrape", lambda: found.value('up{job="foreshock"}') == 1)
        yield found


def test_alertmanager_orders_the_switch_of_a_warning_and_the_watchdog_repeats(stack: Stack) -> None:
    mode = f'foreshock_head_mode{{run="{RUN}", layer="0", head="2"}}'
    eventually("the switched head", lambda: stack.value(mode) == 1)
    assert stack.value(f"count_over_time(({mode} == 0)[1m:500ms])") > 0, "it was plain before"
    assert stack.value('foreshock_service_webhooks_total{sender="alertmanager", result="ordered"}') == 1
    eventually("the watchdog", lambda: stack.value('foreshock_service_webhooks_total{result="watchdog"}') >= 2)
    applied = f'foreshock_switch_outcomes_total{{run="{RUN}", mode="exact_delta", outcome="applied"}}'
    eventually("the confirmed switch", lambda: stack.value(applied) == 1)


def test_every_board_query_and_rule_metric_returns_data(stack: Stack) -> None:
    missing = dict.fromkeys(queries(), "not queried")
    assert missing

    def none_missing() -> bool:
        for query in list(missing):
            missing[query] = stack.error_of(query)
            if not missing[query]:
                del missing[query]
        return not missing

    with suppress(pytest.fail.Exception):
        eventually("data for every query", none_missing)
    assert missing == {}


def test_prometheus_loads_and_evaluates_every_rule_without_errors(stack: Stack) -> None:
    def evaluated() -> list[dict[str, Any]]:
        groups = httpx.get(f"{stack.prometheus}/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    eventually("every rule evaluated", lambda: all(rule["health"] != "unknown" for rule in evaluated()))
    assert {rule["name"]: rule["health"] for rule in evaluated()} == {alert.name: "ok" for _, alert in alerts()}
    firing = {rule["name"] for rule in evaluated() if rule["state"] == "firing"}
    assert firing == {
        "ForeshockHeadFailing",
        "ForeshockAgentDropping",
        "ForeshockAgentFault",
        "ForeshockWatchdog",
    }
