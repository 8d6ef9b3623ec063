"""Memory of a service that works for an hour. `foreshock bench memory`.

Ranks of one run post a sample each every few seconds, and a reader asks for /metrics and for the page of the run. The
load is light, since the question is what a service keeps, and not how much it takes.
"""

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from foreshock.benchmarks import machine
from foreshock.benchmarks.ingest import cpu_seconds, memory_bytes, written
from foreshock.benchmarks.ingest_clients import Load, run_load
from foreshock.benchmarks.service import CURVES_OF_PAGE
from foreshock.server.testing import LiveService

RANKS: Final = 64
POST_SECONDS: Final = 4.0
STEPS: Final = 10
READ_SECONDS: Final = 15.0
"""The first time every rank has described its process."""
LOOK_SECONDS: Final = 30.0
_RUN: Final = "memory-0"


def main(json_path: Path | None = None, *, seconds: float = 3600.0) -> dict[str, Any]:
    """Measure, print and write JSON; the figures."""
    looks: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder, LiveService(Path(folder), metrics_seconds=1.0) as service:
        done, began = threading.Event(), time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(_look, service, done, began, looks), pool.submit(_read, service, done)]
            try:
                load = Load(service.url, RANKS, 1, seconds, "memory", POST_SECONDS, STEPS)
                result = run_load(load, processes=1)
            finally:
                done.set()
        for other in others:
            other.result()
        cores = cpu_seconds(service) / (time.monotonic() - began)
        report = machine.header("foreshock bench memory --json FILE") | {
            "seconds": seconds,
            "ranks": RANKS,
            "statuses": dict(result.statuses),
            "service_cores": round(cores, 3),
            "database_bytes": (Path(folder) / "foreshock.db").stat().st_size,
            **growth(looks),
            "looks": looks,
        }
    return written(report, json_path)


def growth(looks: list[tuple[float, float]]) -> dict[str, float]:
    """Of looks at (seconds, MiB): the median of each quarter of the time, and what the last adds to the second."""
    quarters = [float(np.median(part)) for part in np.array_split([mib for _, mib in looks], 4)]
    return {
        **{f"mib_of_quarter_{number}": round(mib, 1) for number, mib in enumerate(quarters, 1)},
        "mib_grown": round(quarters[3] - quarters[1], 1),
    }


def _look(service: LiveService, done: threading.Event, began: float, looks: list[tuple[float, float]]) -> None:
    while not done.wait(LOOK_SECONDS):
        looks.append((round(time.monotonic() - began), round(memory_bytes(service) / 2**20, 1)))
        print(*looks[-1], "MiB", flush=True)


def _read(service: LiveService, done: threading.Event) -> None:
    with service.client(timeout=120.0) as client:
        while not done.wait(READ_SECONDS):
            for path in ("/metrics", f"/v1/runs/{_RUN}", f"/v1/runs/{_RUN}/curves?max_points=600&{CURVES_OF_PAGE}"):
                client.get(path).raise_for_status()
