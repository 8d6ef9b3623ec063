"""What the service takes in: batches a second, and under overload. `foreshock bench ingest`.

A real service process on 127.0.0.1 is driven by real client processes; every batch holds one sample of 12 layers x 12
heads with every metric. Clients and service share the machine's cores.
"""

import json
import os
import platform
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Self

import httpx
import psutil  # type: ignore[import-untyped]

import foreshock
from foreshock.benchmarks.ingest_clients import HEADS, LAYERS, Load, Result, run_load, template
from foreshock.server.testing import LiveService

CLIENTS: Final = 32
"""Connections that keep two cores busy; the overload has ten times as many."""


class Watch:
    """Looks at the service once a quarter of a second: memory, and whether /healthz and /metrics answer."""

    def __init__(self, service: LiveService) -> None:
        self.rss_bytes, self.answers, self.slowest_seconds = 0, Counter[str](), 0.0
        self._service, self._process = service, psutil.Process(service.pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        with self._service.client(timeout=10.0) as client:
            while not self._stop.wait(0.25):
                self.rss_bytes = max(self.rss_bytes, self._process.memory_info().rss)
                for path in ("/healthz", "/metrics"):
                    began = time.monotonic()
                    try:
                        self.answers[f"{path} {client.get(path).status_code}"] += 1
                    except httpx.HTTPError as error:
                        self.answers[f"{path} {type(error).__name__}"] += 1
                    self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)


def main(
    json_path: Path | None = None,
    *,
    seconds: float = 20.0,
    overload_seconds: float = 60.0,
    database_url: str | None = None,
) -> dict[str, Any]:
    """Measure, print and write JSON; the figures. The run takes about `seconds` and a minute more.

    `database_url` names a PostgreSQL database that may be written to; without one a new SQLite file is used.
    """
    # The limit for each run is taken away: what is measured is the service, not its fairness.
    environment = {"FORESHOCK_RUN_BATCHES_PER_SECOND": "1e9"}
    if database_url is not None:
        environment |= {"FORESHOCK_DATABASE_URL": database_url, "FORESHOCK_MIGRATE": "true"}
    name = f"bench-{time.time_ns():x}"
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveService(Path(folder), environment, metrics_seconds=1.0) as service,
    ):
        run_load(Load(service.url, CLIENTS, CLIENTS, 2.0, f"{name}-warm"))
        report = device(database_url)
        report["sustained"] = _sustained(service, Load(service.url, CLIENTS, CLIENTS, seconds, f"{name}-a"))
        report["overload"] = _overload(service, Load(service.url, 10 * CLIENTS, CLIENTS, overload_seconds, f"{name}-b"))
    print(json.dumps(report, indent=2))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


def device(database_url: str | None) -> dict[str, Any]:
    """Where and with what is measured."""
    return here("foreshock bench ingest --json FILE") | {
        "store": "SQLite, WAL, synchronous=FULL" if database_url is None else "PostgreSQL",
        "batch": {"layers": LAYERS, "heads": HEADS, "bytes": len(template())},
    }


def here(command: str) -> dict[str, Any]:
    """How a result of this machine's processors begins: the command, the day, the processor and the versions."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    packages = ("fastapi", "uvicorn", "uvloop", "httptools", "sqlalchemy", "pydantic")
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": {"cpu": cpu, "cores": os.cpu_count(), "load_at_start": round(os.getloadavg()[0], 2)},
        "versions": {
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "foreshock": foreshock.__version__,
            **{name: version(name) for name in packages},
        },
    }


def cpu_seconds(service: LiveService) -> float:
    """Processor seconds that the service has taken so far."""
    times = psutil.Process(service.pid).cpu_times()
    return float(times.user + times.system)


def _figures(result: Result, cpu_seconds: float) -> dict[str, Any]:
    answered = sum(result.statuses.values())
    return {
        "batches_per_second": round(result.stored_per_second, 1),
        "p50_seconds": round(result.quantile(0.5), 4),
        "p99_seconds": round(result.quantile(0.99), 4),
        "cpu_milliseconds_per_batch": round(1e3 * cpu_seconds / max(1, result.statuses[200]), 3),
        "service_cores": round(cpu_seconds / result.seconds, 2),
        "clients_cpu_milliseconds_per_batch": round(1e3 * result.cpu_seconds / max(1, result.statuses[200]), 3),
        "clients_cores": round(result.cpu_seconds / result.seconds, 2),
        "share_2xx": round(result.statuses[200] / answered, 4),
        "share_429": round(result.statuses[429] / answered, 4),
        "share_5xx": round(sum(n for status, n in result.statuses.items() if status >= 500) / answered, 4),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _sustained(service: LiveService, load: Load) -> dict[str, Any]:
    before = cpu_seconds(service)
    result = run_load(load)
    figures = _figures(result, cpu_seconds(service) - before)
    return {"clients": load.clients, **figures, "refusals_with_retry_after": result.retry_after == result.statuses[429]}


def _overload(service: LiveService, load: Load) -> dict[str, Any]:
    start = psutil.Process(service.pid).memory_info().rss
    with Watch(service) as watch:
        figures = _sustained(service, load)
    return {
        **figures,
        "looks": dict(watch.answers),
        "slowest_look_seconds": round(watch.slowest_seconds, 3),
        "rss_before_bytes": start,
        "rss_largest_bytes": watch.rss_bytes,
    }
