"""Runs a program in several processes of one machine, as torchrun does, for tests."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def trained(program: Path, world: int, folder: Path, *arguments: str, seconds: float = 600) -> list[Any]:
    """What each of `world` processes of `program FOLDER ARGUMENTS` saved as FOLDER/RANK.pt."""
    launch = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={world}"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONFAULTHANDLER": "1",  # a process that a signal ends says where it was
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "torch.distributed.run", *launch, str(program), str(folder), *arguments],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        status = process.wait(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert status == 0, (folder / "log").read_text()[-20_000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
