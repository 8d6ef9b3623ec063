"""Every result file of a GPU begins with the command that made it, the day, and what it was measured on."""

from datetime import datetime
from typing import Any

import pytest

from foreshock.benchmarks import machine

GPU: dict[str, Any] = {
    "commit": "abc",
    "device": "a GPU",
    "clocks": {"driver_version": "1"},
    "versions": {"torch": "2"},
}


def test_the_header_is_the_command_the_day_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu", lambda: GPU)
    header = machine.header("foreshock bench nothing")
    assert list(header) == ["command", "date", *GPU]
    assert header["command"] == "foreshock bench nothing"
    assert {name: header[name] for name in GPU} == GPU
    assert datetime.fromisoformat(header["date"]).date().isoformat() == header["date"]
