"""Console and log lines of a training: one line per incident, not per head, and the address of the live page."""

import logging
from collections import Counter
from typing import Any

import pytest
from tests.faults.hostile_server import acknowledge, hostile_server
from tests.monitor.doubles import ScriptedDetectors, verdict
from tests.monitor.test_switch import run
from tests.monitor.tiny_models import tiny_gpt

from foreshock.contract import wire
from foreshock.contract.incident import page_of
from foreshock.monitor import attach
from foreshock.monitor.config import AgentConfig
from foreshock.monitor.console import ConsoleReporter
from foreshock.monitor.guard import Guard
from foreshock.monitor.outbox import Outbox


def head_verdict(number: int, **changes: Any) -> wire.Verdict:
    """A verdict on head `number` of a model with twelve heads per layer."""
    return verdict(number // 12, number % 12).model_copy(update={"id": f"w{number}", **changes})


def console(policy: wire.Policy = "observe") -> ConsoleReporter:
    return ConsoleReporter(AgentConfig(url=None, policy=policy), [])


def test_warnings_of_144_heads_give_three_lines_and_their_end_one() -> None:
    reporter = console()
    lines = [line for number in range(144) for line in reporter.lines_for([head_verdict(number)], dict)]
    assert len(lines) == 3
    assert lines[0].startswith(
        "foreshock: warning: Rounding makes attention scores drift in layer 0 head 0, since step"
    )
    assert lines[2].startswith(
        "foreshock: warning: Rounding makes attention scores drift in 100 heads of layers 0 to 8"
    )
    assert lines[2].endswith("To do: Switch every head to row_corrected.")
    quiet = [
        line for n in range(144) for line in reporter.lines_for([head_verdict(n, state="cleared", step=9000)], dict)
    ]
    assert len(quiet) == 1
    assert quiet[0].endswith("Quiet since step 9,000.")


def test_incident_is_reported_again_when_critical_or_reopened() -> None:
    reporter = console("auto")
    assert len(reporter.lines_for([head_verdict(0)], dict)) == 1
    assert reporter.lines_for([head_verdict(0, state="updated", step=20)], dict) == []
    [worse] = reporter.lines_for([head_verdict(0, state="updated", step=30, severity="critical")], dict)
    assert worse.startswith("foreshock: critical: ")
    assert "Policy auto: the agent switches every head to row_corrected" in worse
    assert len(reporter.lines_for([head_verdict(0, state="cleared", step=40)], dict)) == 1
    assert len(reporter.lines_for([head_verdict(0, step=900)], dict)) == 1


def test_warning_corrected_to_rounding_is_reported_as_that_incident() -> None:
    reporter = console()
    [first] = reporter.lines_for([head_verdict(5, cause="score growth")], dict)
    assert "To do: Lower the learning rate" in first
    corrected = head_verdict(5, state="updated", step=30, corrected_from="score growth", corrected_step=30)
    [line] = reporter.lines_for([corrected], dict)
    assert "Rounding makes" in line
    assert "Corrected: until step 30 this was reported as score growth." in line
    assert reporter.lines_for([corrected.model_copy(update={"step": 31})], dict) == []
    [quiet] = reporter.lines_for([corrected.model_copy(update={"step": 90, "state": "cleared"})], dict)
    assert "Quiet since step 90" in quiet


@pytest.mark.parametrize("quiet", [True, False])
def test_warnings_and_switches_are_logged_unless_quiet(quiet: bool, caplog: pytest.LogCaptureFixture) -> None:
    warned = [verdict(0, 1), verdict(1, 0)]
    agent, _ = run(tiny_gpt(), {3: warned}, 6, policy="auto", switch_scope="model", quiet=quiet)
    agent.close()
    messages = [line for line in caplog.messages if line.startswith("foreshock: ")]
    assert len(messages) == (0 if quiet else 2)
    assert quiet or "heads are switched to row_corrected" in messages[1]


@pytest.mark.parametrize(
    ("settings", "heads", "logs"),
    [
        ({}, (0, 1), True),
        ({"quiet": True}, (0, 1), False),
        ({"rank": 1}, (0, 1), False),  # a replica, whose first rank logs the same
        ({"rank": 1}, (2, 3), True),  # heads that only this rank has under tensor parallelism
        ({"rank": 1, "first_layer": 4}, (0, 1), True),
        ({"rank": 1, "first_layer": {"a": 0}}, (0, 1), True),
    ],
)
def test_only_the_first_rank_of_replicated_heads_logs(
    settings: dict[str, Any], heads: tuple[int, ...], logs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    layer = wire.Layer(layer=0, name="a", heads=heads, kv_heads=2, head_dim=8, served_by="probe")
    console = ConsoleReporter(AgentConfig(url=None, run="r", world_size=2, **settings), [layer])
    console.log_lines(["a line"])
    assert caplog.messages == ["a line"] * logs


@pytest.mark.parametrize("quiet", [False, True])
def test_incident_is_printed_once_without_logging_setup(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent, _ = run(tiny_gpt(), {3: [verdict(0, 1)]}, 2, quiet=quiet)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # removes pytest's handlers, which would swallow the lines
    for _ in range(4):
        agent.step(1.0)
    agent.close()
    printed = [line for line in capsys.readouterr().err.splitlines() if "layer 0 head 1" in line]
    assert [line.split(":")[0] for line in printed] == ["foreshock, step 1" if quiet else "foreshock"]


STARTED = wire.Started(
    step=0, unix_seconds=1.0, world_size=1, layers=(), policy="observe", numerics="auto", mitigation="exact_delta"
)


def test_first_warning_of_an_incident_is_logged_as_warning_and_later_ones_as_info(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outbox = Outbox({name: Guard(name, Counter()) for name in ("sinks", "sender", "mirror", "tracker")})
    outbox.begin(STARTED)

    def levels(*verdicts: wire.Verdict) -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO", "foreshock"):
            for each in verdicts:
                outbox.emit(each)
        return [record.levelname for record in caplog.records]

    heads = [verdict(number // 12, number % 12).model_copy(update={"id": f"w{number}"}) for number in range(144)]
    assert levels(*heads) == ["WARNING"] + ["INFO"] * 143
    growth = heads[0].model_copy(update={"id": "g", "cause": "score growth"})
    assert levels(growth) == ["WARNING"], "another cause is another incident"
    note = growth.model_copy(update={"id": "n", "severity": "info"})
    assert levels(note) == ["INFO"]
    cleared = [head.model_copy(update={"state": "cleared"}) for head in heads]
    assert levels(*cleared) == []
    assert levels(heads[7]) == ["WARNING"], "the incident was over before"


@pytest.mark.parametrize(
    ("settings", "lines"),
    [({}, 1), ({"quiet": True}, 0), ({"rank": 1, "world_size": 2}, 0), ({"url": None}, 0)],
)
def test_first_rank_of_a_run_with_a_service_prints_its_page_once(
    settings: dict[str, Any], lines: int, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with hostile_server(acknowledge) as server:
        given = {"url": server.url, "run": "mine", "spool_directory": None, "sample_every_steps": 1, **settings}
        with attach(tiny_gpt(), **given) as agent:
            agent.detectors = ScriptedDetectors(4, {1: [verdict(0, 1)]})
            for _ in range(4):
                agent.step(1.0)
        page = f"{server.url}/?runs=mine"
    assert capsys.readouterr().err.count(f"foreshock: live page {page}\n") == lines
    [warning] = [line for line in caplog.messages if "layer 0 head 1" in line]
    assert warning.endswith(f" ({page})") == (given["url"] is not None)


def test_nonfinite_incident_proposes_no_switch_and_page_address_quotes_the_run() -> None:
    nan = head_verdict(3, step=500, cause="other", signal="nonfinite", severity="critical")
    [line] = console("auto").lines_for([nan], dict)
    assert "No head was switched: a switch cannot repair non-finite numbers. To do: Stop the run" in line
    assert (
        page_of("https://here/foreshock/", "team/run-1:a", "b&c") == "https://here/foreshock/?runs=team/run-1:a,b%26c"
    )
