"""Runs a function or a program in several local processes, like torchrun.

torchrun itself starts programs. Functions run in processes that are forked after the imports, because torchrun would
import PyTorch again in each process.
"""

import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_on_ranks(
    run: Callable[..., Any] | Path, world: int, folder: Path, *arguments: str, seconds: float = 600
) -> list[Any]:
    """The results of `run(*arguments)` on `world` ranks, or of the program `run FOLDER ARGUMENTS`, which saves them to
    FOLDER/RANK.pt."""
    if isinstance(run, Path):
        launch = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={world}", str(run), str(folder)]
        command = ["-m", "torch.distributed.run", *launch]
    else:
        command = [__file__, str(folder), str(world), f"{run.__module__}:{run.__name__}"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONFAULTHANDLER": "1",  # a process that a signal kills prints its stack
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", *command, *arguments],
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


def main(folder: Path, world: int, name: str, *arguments: str) -> int:
    """Forks all processes; if one fails, kills the others."""
    module, _, function = name.partition(":")
    run = getattr(importlib.import_module(module), function)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": str(uuid.uuid4())}
    children = set()
    for rank in range(world):
        if (child := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            _run_rank(lambda: run(*arguments), folder, "nccl" if "cuda" in arguments else "gloo")
        children.add(child)
    failed = False
    while children:
        ended, status = os.wait()
        children.remove(ended)
        if status != 0 and not failed:
            failed = True
            for child in children:
                os.kill(child, signal.SIGKILL)
    return int(failed)


def _run_rank(run: Callable[[], Any], folder: Path, backend: str) -> None:
    """Runs one rank: joins the process group and saves the function's result."""
    try:
        torch.set_num_threads(1)
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
        torch.save(run(), folder / f"{dist.get_rank()}.pt")
        dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)  # gloo's threads may outlive the interpreter


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))  # last: tests/kernels must not shadow another package
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
