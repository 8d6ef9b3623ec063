"""What a training prints and logs: each incident once, never a line for each head, and where its page is."""

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


def told(number: int, **changes: Any) -> wire.Verdict:
    """About head `number` of a model with twelve heads a layer."""
    return verdict(number // 12, number % 12).model_copy(update={"id": f"w{number}", **changes})


def console(policy: wire.Policy = "observe") -> ConsoleReporter:
    return ConsoleReporter(AgentConfig(url=None, policy=policy), [])


def test_a_flood_of_144_heads_is_three_lines_and_its_end_is_one() -> None:
    speaks = console()
    lines = [line for number in range(144) for line in speaks.lines_for([told(number)], dict)]
    assert len(lines) == 3
    assert lines[0].startswith(
        "foreshock: warning: Rounding makes attention scores drift in layer 0 head 0, since step"
    )
    assert lines[2].startswith(
        "foreshock: warning: Rounding makes attention scores drift in 100 heads of layers 0 to 8"
    )
    assert lines[2].endswith("To do: Switch every head to row_corrected.")
    quiet = [line for n in range(144) for line in speaks.lines_for([told(n, state="cleared", step=9000)], dict)]
    assert len(quiet) == 1
    assert quiet[0].endswith("Quiet since step 9,000.")


def test_it_speaks_again_when_an_incident_turns_critical_and_when_it_opens_anew() -> None:
    speaks = console("auto")
    assert len(speaks.lines_for([told(0)], dict)) == 1
    assert speaks.lines_for([told(0, state="updated", step=20)], dict) == []
    [worse] = speaks.lines_for([told(0, state="updated", step=30, severity="critical")], dict)
    assert worse.startswith("foreshock: critical: ")
    assert "Policy auto: the agent switches every head to row_corrected" in worse
    assert len(speaks.lines_for([told(0, state="cleared", step=40)], dict)) == 1
    assert len(speaks.lines_for([told(0, step=900)], dict)) == 1


def test_a_warning_that_turns_out_to_be_rounding_moves_to_that_incident() -> None:
    speaks = console()
    [first] = speaks.lines_for([told(5, cause="score growth")], dict)
    assert "To do: Lower the learning rate" in first
    corrected = told(5, state="updated", step=30, corrected_from="score growth", corrected_step=30)
    [line] = speaks.lines_for([corrected], dict)
    assert "Rounding makes" in line
    assert "Corrected: until step 30 this was reported as score growth." in line
    assert speaks.lines_for([corrected.model_copy(update={"step": 31})], dict) == []
    [quiet] = speaks.lines_for([corrected.model_copy(update={"step": 90, "state": "cleared"})], dict)
    assert "Quiet since step 90" in quiet


@pytest.mark.parametrize("quiet", [True, False])
def test_the_agent_tells_what_it_warns_about_and_switches_unless_it_is_quiet(
    quiet: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warned = [verdict(0, 1), verdict(1, 0)]
    agent, _ = run(tiny_gpt(), {3: warned}, 6, policy="auto", switch_scope="model", quiet=quiet)
    agent.close()
    said = [line for line in caplog.messages if line.startswith("foreshock: ")]
    assert len(said) == (0 if quiet else 2)
    assert quiet or "heads are switched to row_corrected" in said[1]


@pytest.mark.parametrize(
    ("settings", "heads", "speaks"),
    [
        ({}, (0, 1), True),
        ({"quiet": True}, (0, 1), False),
        ({"rank": 1}, (0, 1), False),  # a replica: the first one says the same
        ({"rank": 1}, (2, 3), True),  # heads that tensor parallelism gave to this rank alone
        ({"rank": 1, "first_layer": 4}, (0, 1), True),
        ({"rank": 1, "first_layer": {"a": 0}}, (0, 1), True),
    ],
)
def test_of_ranks_that_hold_the_same_heads_the_first_speaks(
    settings: dict[str, Any], heads: tuple[int, ...], speaks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    layer = wire.Layer(layer=0, name="a", heads=heads, kv_heads=2, head_dim=8, served_by="probe")
    console = ConsoleReporter(AgentConfig(url=None, run="r", world_size=2, **settings), [layer])
    console.log_lines(["a line"])
    assert caplog.messages == ["a line"] * speaks


@pytest.mark.parametrize("quiet", [False, True])
def test_an_incident_stands_once_on_the_terminal_of_a_training_that_set_up_no_logging(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent, _ = run(tiny_gpt(), {3: [verdict(0, 1)]}, 2, quiet=quiet)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's, which would keep the lines to themselves
    for _ in range(4):
        agent.step(1.0)
    agent.close()
    told = [line for line in capsys.readouterr().err.splitlines() if "layer 0 head 1" in line]
    assert [line.split(":")[0] for line in told] == ["foreshock, step 1" if quiet else "foreshock"]


STARTED = wire.Started(
    step=0, unix_seconds=1.0, world_size=1, layers=(), policy="observe", numerics="auto", mitigation="exact_delta"
)


def test_of_144_heads_that_one_cause_reaches_the_first_is_a_warning_of_the_log_and_the_others_are_for_who_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    box = Outbox({name: Guard(name, Counter()) for name in ("sinks", "sender", "mirror", "tracker")})
    box.begin(STARTED)

    def levels(*told: wire.Verdict) -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO", "foreshock"):
            for each in told:
                box.emit(each)
        return [record.levelname for record in caplog.records]

    heads = [verdict(number // 12, number % 12).model_copy(update={"id": f"w{number}"}) for number in range(144)]
    assert levels(*heads) == ["WARNING"] + ["INFO"] * 143
    growth = heads[0].model_copy(update={"id": "g", "cause": "score growth"})
    assert levels(growth) == ["WARNING"], "another cause is another incident"
    note = growth.model_copy(update={"id": "n", "severity": "info"})
    assert levels(note) == ["INFO"]
    cleared = [head.model_copy(update={"state": "cleared"}) for head in heads]
    assert levels(*cleared) == []
    assert levels(heads[7]) == ["WARNING"], "all was quiet again"


@pytest.mark.parametrize(
    ("settings", "lines"),
    [({}, 1), ({"quiet": True}, 0), ({"rank": 1, "world_size": 2}, 0), ({"url": None}, 0)],
)
def test_the_first_process_of_a_run_with_a_service_prints_its_page_once(
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


def test_what_is_not_finite_is_never_answered_with_a_switch_and_a_page_is_an_address_of_its_runs() -> None:
    nan = told(3, step=500, cause="other", signal="nonfinite", severity="critical")
    [line] = console("auto").lines_for([nan], dict)
    assert "No head was switched: a switch cannot repair non-finite numbers. To do: Stop the run" in line
    assert (
        page_of("https://here/foreshock/", "team/run-1:a", "b&c") == "https://here/foreshock/?runs=team/run-1:a,b%26c"
    )
