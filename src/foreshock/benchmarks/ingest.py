"""What the service takes in: batches a second, and under overload. `foreshock bench ingest`.

A real service process on 127.0.0.1 is driven by real client processes; every batch holds one sample of 12 layers x 12
heads with every metric. Clients and service share the machine's cores.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

from foreshock.benchmarks import machine
from foreshock.benchmarks.ingest_clients import HEADS, LAYERS, Load, Result, run_load, template
from foreshock.server.testing import LiveService

CLIENTS: Final = 32
"""Connections that keep two cores busy; the overload has ten times as many."""
UNLIMITED: Final = 1e9
"""Batches a second that a token may send for one run: the service is measured, not its fairness."""


def main(json_path: Path | None = None, *, seconds: float = 20.0, database_url: str | None = None) -> dict[str, Any]:
    """Measure, print and write JSON; the figures. The overload takes three times `seconds`.

    `database_url` names a PostgreSQL database that may be written to; without one a new SQLite file is used.
    """
    address = {} if database_url is None else {"FORESHOCK_DATABASE_URL": database_url, "FORESHOCK_MIGRATE": "true"}
    name = f"bench-{time.time_ns():x}"
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveService(Path(folder), address, metrics_seconds=1.0, run_batches_per_second=UNLIMITED) as service,
    ):
        run_load(Load(service.url, CLIENTS, CLIENTS, 2.0, f"{name}-warm"))
        report = machine.header("foreshock bench ingest --json FILE") | {
            "store": "SQLite, WAL, synchronous=FULL" if database_url is None else "PostgreSQL",
            "batch": {"layers": LAYERS, "heads": HEADS, "bytes": len(template())},
            "sustained": loaded(service, Load(service.url, CLIENTS, CLIENTS, seconds, f"{name}-a")),
            "overload": loaded(service, Load(service.url, 10 * CLIENTS, CLIENTS, 3 * seconds, f"{name}-b")),
        }
    return written(report, json_path)


def written(report: dict[str, Any], json_path: Path | None) -> dict[str, Any]:
    """The report, once it is printed and in its file."""
    text = json.dumps(report, indent=2)
    print(text)
    if json_path is not None:
        json_path.write_text(text + "\n")
    return report


def cpu_seconds(service: LiveService) -> float:
    """Processor seconds that the service has taken so far."""
    times = psutil.Process(service.pid).cpu_times()
    return float(times.user + times.system)


def memory_bytes(service: LiveService) -> int:
    """Of the service's process."""
    return int(psutil.Process(service.pid).memory_info().rss)


def loaded(service: LiveService, load: Load) -> dict[str, Any]:
    """What a load came to."""
    before, memory = cpu_seconds(service), memory_bytes(service)
    result = run_load(load)
    figures = figures_of(result, cpu_seconds(service) - before)
    return {"clients": load.clients, **figures, "memory_bytes": [memory, memory_bytes(service)]}


def figures_of(result: Result, cpu_seconds: float) -> dict[str, Any]:
    """What clients saw, and what it cost the service."""
    answered, stored = sum(result.statuses.values()), max(1, result.statuses[200])
    return {
        "batches_per_second": round(result.stored_per_second, 1),
        "p50_seconds": round(result.quantile(0.5), 4),
        "p99_seconds": round(result.quantile(0.99), 4),
        "cpu_milliseconds_per_batch": round(1e3 * cpu_seconds / stored, 3),
        "service_cores": round(cpu_seconds / result.seconds, 2),
        "clients_cpu_milliseconds_per_batch": round(1e3 * result.cpu_seconds / stored, 3),
        "clients_cores": round(result.cpu_seconds / result.seconds, 2),
        "share_2xx": round(result.statuses[200] / answered, 4),
        "share_429": round(result.statuses[429] / answered, 4),
        "share_5xx": round(sum(n for status, n in result.statuses.items() if status >= 500) / answered, 4),
        "refusals_with_retry_after": result.retry_after == result.statuses[429],
        "load_average": round(os.getloadavg()[0], 2),
    }
