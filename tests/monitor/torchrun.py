"""Runs a function of the tests, or a program, in several processes of one machine, as torchrun does."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def trained(
    run: Callable[..., Any] | Path, world: int, folder: Path, *arguments: str, seconds: float = 600
) -> list[Any]:
    """What `run(*arguments)` returns in each of `world` processes, or the program `run FOLDER ARGUMENTS` saves as
    FOLDER/RANK.pt."""
    if not isinstance(run, Path):
        arguments = (f"{run.__module__}:{run.__name__}", *arguments)
    program = run if isinstance(run, Path) else Path(__file__)
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


def main(folder: Path, name: str, *arguments: str) -> None:
    """One process: joins the others, and saves what the function returns."""
    torch.set_num_threads(1)
    if "cuda" in arguments:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if "cuda" in arguments else "gloo")
    module, _, function = name.partition(":")
    torch.save(getattr(importlib.import_module(module), function)(*arguments), folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))  # last: our kernels/ must not stand before another package's
    main(Path(sys.argv[1]), *sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's end
