"""Result files: the description of the machine, and the results as JSON."""

import json
import os
import platform
import re
import shutil
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

_PACKAGES: Final = ("torch", "fastapi", "uvicorn", "uvloop", "httptools", "sqlalchemy", "pydantic")
_CPU_INFO: Final = Path("/proc/cpuinfo")
"""Exists only on Linux."""


def header(command: str) -> dict[str, Any]:
    """Return the header of a result file: command, date (UTC), commit, GPU or CPU, and versions that affect speed.

    The commit is empty without git or outside a clone. Packages that are not installed are left out.
    """
    versions: dict[str, Any] = {"python": platform.python_version(), **_installed()}
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        versions |= {"triton": version("triton"), "cuda": torch.version.cuda, "cudnn": cudnn}
    else:
        model = re.search(r"model name\s*: (.*)", _CPU_INFO.read_text() if _CPU_INFO.exists() else "")
        device = f"{model[1] if model else 'CPU'}, {torch.get_num_threads()} threads of {os.cpu_count()} processors"
    day = datetime.now(UTC).date().isoformat()
    return {"command": command, "date": day, "commit": _commit(), "device": device, "versions": versions}


def _installed() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):  # a machine for GPU benchmarks does not need those of the service
            versions[name] = version(name)
    return versions


def _commit() -> str:
    if shutil.which("git") is None:
        return ""
    asked = ("git", "rev-parse", "--short", "HEAD")
    done = subprocess.run(asked, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip()


def written(report: dict[str, Any], json_path: Path | None) -> dict[str, Any]:
    """Print the report, write it to `json_path` if given, and return it."""
    text = json.dumps(report, indent=2)
    print(text)
    if json_path is not None:
        json_path.write_text(text + "\n")
    return report
