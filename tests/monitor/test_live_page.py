"""What a person learns of where the run is shown, and a service of who serves its layers, as both stand now."""

from typing import Any

import pytest
import torch
from tests.faults.hostile_server import acknowledge, hostile_server
from tests.monitor.doubles import ScriptedDetectors, verdict
from tests.monitor.tiny_models import tiny_gpt, train_step

from foreshock.contract.incident import page_of
from foreshock.monitor import attach


@pytest.mark.parametrize(
    ("url", "runs", "page"),
    [
        ("http://here:8765", ["team/run-1:a"], "http://here:8765/?runs=team/run-1:a"),
        ("https://here/foreshock/", ["a", "b"], "https://here/foreshock/?runs=a,b"),
        ("http://here", ["a b&c"], "http://here/?runs=a%20b%26c"),
    ],
)
def test_a_page_is_an_address_of_its_runs(url: str, runs: list[str], page: str) -> None:
    assert page_of(url, *runs) == page


@pytest.mark.parametrize(
    ("settings", "lines"),
    [({}, 1), ({"quiet": True}, 0), ({"rank": 1, "world_size": 2}, 0), ({"url": None}, 0)],
)
def test_the_first_process_of_a_run_with_a_service_prints_its_page_once(
    settings: dict[str, Any], lines: int, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with hostile_server(acknowledge) as server:
        given = {"url": server.url, "run": "mine", "spool_directory": None, "sample_every_steps": 1, **settings}
        with attach(tiny_gpt(), **given, sample_every_seconds=0.0) as agent:
            agent.detectors = ScriptedDetectors(4, {1: [verdict(0, 1)]})
            for _ in range(4):
                agent.step(1.0)
        page = f"{server.url}/?runs=mine"
    assert capsys.readouterr().err.count(f"foreshock: live page {page}\n") == lines
    [warning] = [line for line in caplog.messages if "layer 0 head 1" in line]
    assert warning.endswith(f" ({page})") == (given["url"] is not None)


def test_who_serves_a_layer_is_sent_anew_when_it_changes() -> None:
    model = tiny_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hostile_server(acknowledge) as server:
        given: dict[str, Any] = {"url": server.url, "run": "mine", "spool_directory": None, "quiet": True}
        with attach(model, **given, attention="keep", sample_every_steps=1, sample_every_seconds=0.0) as agent:
            for step in range(1, 9):
                if step == 4:
                    agent.set_mode([(1, 0), (1, 1)], "row_corrected", "a test")
                agent.step(train_step(model, optimizer, step))
        told = [[(each["served_by"], each["sampled"]) for each in it["layers"]] for it in server.events("started")]
        steps = [it["step"] for it in server.events("started")]
    assert told == [[("probe", True)] * 2, [("probe", True), ("reference", False)]]
    assert steps == [0, 0]  # it is the same start
