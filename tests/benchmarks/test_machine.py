"""The header of result files, on a machine that has less than a development machine."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from foreshock.benchmarks import machine


def test_gpu_header_needs_neither_service_packages_nor_git(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in ("torch", "triton"):
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(machine, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setenv("PATH", "")
    header: dict[str, Any] = machine.header("a command")
    assert (header["command"], header["commit"], header["device"]) == ("a command", "", "a GPU")
    assert header["versions"].keys() == {"python", "torch", "triton", "cuda", "cudnn"}


def test_cpu_header_does_not_need_a_proc_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_CPU_INFO", Path("/no/such/file"))
    assert machine.header("a command")["device"].startswith("CPU, ")
