"""What a figure was measured on."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

_CLOCKS = "driver_version,clocks.current.sm,clocks.max.sm,clocks.current.memory,power.limit,temperature.gpu"


def header(command: str) -> dict[str, Any]:
    """How a result file begins: the command that made it, the day (UTC), and what it was measured on."""
    return {"command": command, "date": datetime.now(UTC).date().isoformat(), **device()}


def device() -> dict[str, Any]:
    """The GPU with its driver and clocks at this moment, or the CPU; the versions that matter for speed; the commit.

    Where the files are no clone, the environment variable FORESHOCK_COMMIT names it. Every result file has these.
    """
    commit = os.environ.get("FORESHOCK_COMMIT") or _said("git", "rev-parse", "--short", "HEAD")
    if not torch.cuda.is_available():
        threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} processors"
        info = Path("/proc/cpuinfo")
        models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
        packages = ("torch", "fastapi", "uvicorn", "uvloop", "httptools", "sqlalchemy", "pydantic")
        versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
        return {"commit": commit, "device": f"{models[0] if models else 'CPU'}, {threads}", "versions": versions}
    import triton

    return {
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "clocks": _clocks(),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        },
    }


def _clocks() -> dict[str, str]:
    said = _said("nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader", "--id=0")
    return dict(zip(_CLOCKS.split(","), said.split(", "), strict=False)) if said else {}


def _said(*command: str) -> str | None:
    """What a command prints; None where it is not to be had."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
