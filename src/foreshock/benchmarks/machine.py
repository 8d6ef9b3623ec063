"""Description of the machine for result files."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

_PACKAGES: Final = ("torch", "fastapi", "uvicorn", "uvloop", "httptools", "sqlalchemy", "pydantic")


def header(command: str) -> dict[str, Any]:
    """Return the header of a result file: command, date (UTC), commit, GPU or CPU, and versions that affect speed."""
    asked = ("git", "rev-parse", "--short", "HEAD")
    commit = subprocess.run(asked, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout
    versions: dict[str, Any] = {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        versions |= {"triton": version("triton"), "cuda": torch.version.cuda, "cudnn": cudnn}
    else:
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        device = f"{model[1] if model else 'CPU'}, {torch.get_num_threads()} threads of {os.cpu_count()} processors"
    day = datetime.now(UTC).date().isoformat()
    return {"command": command, "date": day, "commit": commit.strip(), "device": device, "versions": versions}
