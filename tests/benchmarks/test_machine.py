"""Every result file of a GPU begins with the command that made it, the day, and what it was measured on."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from foreshock.benchmarks import attention, machine

GPU: dict[str, Any] = {
    "commit": "abc",
    "device": "a GPU",
    "clocks": {"driver_version": "1"},
    "versions": {"torch": "2"},
}


@pytest.fixture(autouse=True)
def with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "gpu", lambda: GPU)


def beginning(file: Path) -> dict[str, Any]:
    """The fields of a result up to the versions, in order; the day is that of the test."""
    entries = list(json.loads(file.read_text()).items())[: len(GPU) + 2]
    assert [name for name, _ in entries[:2]] == ["command", "date"]
    day = datetime.fromisoformat(entries[1][1]).date()
    assert abs((datetime.now(UTC).date() - day).days) <= 1
    return dict(entries) | {"date": None}


def test_the_header_is_the_command_the_day_and_the_machine() -> None:
    header = machine.header("foreshock bench nothing")
    assert list(header) == ["command", "date", *GPU]
    assert header["command"] == "foreshock bench nothing"
    assert {name: header[name] for name in GPU} == GPU
    assert datetime.fromisoformat(header["date"]).date().isoformat() == header["date"]


def test_the_result_of_attention_begins_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"head_dim": 64, "pass": "both", "foreshock": 1.0, "torch_varlen": 2.0}
    monkeypatch.setattr(attention, "grid", lambda _: [])
    monkeypatch.setattr(attention, "measure_varlen", lambda *_: [cell])
    monkeypatch.setattr(attention, "Stopwatch", lambda _: None)
    attention.main(str(tmp_path / "attention.json"), repeats=3)
    command = "foreshock bench attention --repeats 3 --json attention.json"
    assert beginning(tmp_path / "attention.json") == {"command": command, "date": None} | GPU
