"""Cost of the service at scale, with a long run of a wide model, many ranks and many runs: `foreshock bench service`.

The cost is the CPU time of the service process, which depends little on other programs; `wall` is the response time.
The long run has 1,000,000 steps of 80 layers x 64 heads, with eight samples in every span of 1024 steps. Its 7,800
samples would take 7 GB, so the service rolls up only the first span, whose rows are then copied to the others.
"""

import sqlite3
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

from foreshock.benchmarks import machine
from foreshock.benchmarks.ingest import UNLIMITED, Load, cpu_seconds, loaded, memory_bytes
from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.metrics.metric import MORE_CHARTS
from foreshock.server.store.schema import rollups
from foreshock.server.testing import FakeRank, LiveService, post

_LAST_SPAN: Final = 975
_SPAN: Final = 1024
_REPEATS: Final = 5
_SECONDS: Final = 10.0
"""Duration of each load with 256 ranks."""
_LINE: Final = "head.score_max"
_CHARTS: Final = [m.key for m in HEAD_METRICS if m.chart is not None and m.chart < MORE_CHARTS]
_PAGE: Final = ["run.loss", *(f"{key}{place}" for key in _CHARTS for place in (":0:1", ":0", ":1", ":2", ":3"))]
CURVES_OF_PAGE: Final = "line=" + "&line=".join(_PAGE)
"""The query of a run's page: for each of the first charts, one head and the worst heads of four layers."""


def main(json_path: Path | None = None) -> dict[str, Any]:
    """Measure, print the results, write them as JSON, and return them."""
    report = machine.header("foreshock bench service --json FILE")
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveService(Path(folder), run_batches_per_second=UNLIMITED) as service,
        service.client(timeout=120.0) as client,
    ):
        narrow = FakeRank(run="narrow", layers=12, heads=range(12))
        _send(client, narrow, range(10, 10 * _SPAN + 1, 10))
        file = Path(folder) / "foreshock.db"
        report["database_bytes_of_100000_steps"] = _size_rolled_up(file) * 100_000 // (10 * _SPAN)
        send_long_run(client, file)
        report["memory_before_bytes"] = memory_bytes(service)
        for name, path in {
            "curves of 80 layers": f"/v1/runs/wide/curves?max_points=600&line={_LINE}",
            "curves of the page": f"/v1/runs/wide/curves?max_points=600&{CURVES_OF_PAGE}",
            "matrix": f"/v1/runs/wide/matrix?metric={_LINE}&max_steps=120",
            "run": "/v1/runs/wide",
        }.items():
            report[name] = _cost(service, client, path)
        report["memory_after_bytes"] = memory_bytes(service)
        for number in range(200):
            _send(client, FakeRank(run=f"run-{number}", layers=12, heads=range(12)), (1,))
        report["/metrics of 202 runs"] = _cost(service, client, "/metrics")
        paced = Load(service.url, 256, 1, _SECONDS, "paced", every_seconds=1.0, every_steps=10)
        report["256 ranks of one run, a batch a second each"] = loaded(service, paced)
        report["256 ranks of one run"] = loaded(service, Load(service.url, 256, 1, _SECONDS, "ranks"))
    return machine.written(report, json_path)


def send_long_run(client: httpx.Client, file: Path) -> None:
    """Send the run `wide`, 1,000,000 steps of 80 layers x 64 heads, to a service whose SQLite store is `file`."""
    spans = (0, _LAST_SPAN, _LAST_SPAN + 1)
    steps = (span * _SPAN + step for span in spans for step in range(64, _SPAN, 128))
    _send(client, FakeRank(run="wide", layers=80, heads=range(64)), steps)
    _copy_first_span(file)


def _send(client: httpx.Client, rank: FakeRank, steps: Iterable[int]) -> None:
    post(client, rank.batch(rank.started())).raise_for_status()
    for step in steps:
        post(client, rank.batch(rank.sample(step))).raise_for_status()


def _cost(service: LiveService, client: httpx.Client, path: str) -> dict[str, Any]:
    """Return the least CPU time, the median response time and the size of a response."""
    cpu, wall, size = [], [], 0
    for _ in range(_REPEATS):
        before, began = cpu_seconds(service), time.perf_counter()
        size = len(client.get(path).raise_for_status().content)
        wall.append(time.perf_counter() - began)
        cpu.append(cpu_seconds(service) - before)
    return {"cpu_seconds": round(min(cpu), 3), "wall_seconds": round(median(wall), 3), "bytes": size}


def _size_rolled_up(file: Path) -> int:
    """Wait until all spans except the newest are rolled up, and return the size of the store in bytes."""
    due = "SELECT 1 FROM rollup_spans s WHERE built != changed AND span < (SELECT max(span) FROM rollup_spans"
    with closing(sqlite3.connect(file, timeout=60.0)) as store:
        while store.execute(f"{due} WHERE run_id = s.run_id)").fetchone():
            time.sleep(0.5)
        [size] = store.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size").fetchone()
    return int(size)


def _copy_first_span(file: Path) -> None:
    """Wait until the first span of `wide` is rolled up, and copy the rows that charts need to the other spans."""
    _size_rolled_up(file)
    own = {column.name: column.name for column in rollups.columns}
    copied = ", ".join((own | {"span": "spans.n"}).values())
    spans = "WITH RECURSIVE spans(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM spans WHERE n < ?) INSERT INTO"
    with closing(sqlite3.connect(file, timeout=60.0)) as store:
        store.execute(
            f"{spans} rollups ({', '.join(own)}) SELECT {copied} FROM rollups JOIN spans "  # noqa: S608
            "JOIN runs ON runs.id = run_id "
            "WHERE runs.name = 'wide' AND span = 0 AND (metric IN (?, 'run.loss') OR layer < 4)",
            (_LAST_SPAN - 1, _LINE),
        )
        built = "rollup_spans (run_id, span, changed, built) SELECT id, n, 1, 1 FROM runs, spans WHERE name = 'wide'"
        store.execute(f"{spans} {built}", (_LAST_SPAN - 1,))
        store.commit()
