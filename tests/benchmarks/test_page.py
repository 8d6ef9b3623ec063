"""The benchmark of the page sends a real run and asks what the page asks; here a short one, and without a browser."""

from pathlib import Path

import pytest

from foreshock.benchmarks.browser import page, page_runs
from foreshock.server.testing import LiveService


@pytest.mark.full
def test_the_benchmarks_run_is_rolled_up_and_every_curve_of_the_page_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (page, page_runs):
        monkeypatch.setattr(module, "STEPS", 4608)
    monkeypatch.setattr(page, "REPEATS", 1)
    run = page_runs.LongRun("short", 2, 12, 8)
    with LiveService(tmp_path) as service, service.client() as client:
        page.fill(client, run, tmp_path)
        detail = client.get("/v1/runs/short").json()
        assert (detail["last_step"], detail["active_warnings"]) == (4608, 1)
        figures = page.queries(client, run)["query_seconds"]
        assert all(figure["bytes"] > 500 for figure in figures.values())
        lines = client.get("/v1/runs/short/curves", params={"line": page.page_lines(run)}).json()["lines"]
        drawn = {line["metric"]: len(line["steps"]) for line in lines if line["layer"] in (None, 0)}
        assert drawn["run.loss"] > 100
        drift = next(line for line in lines if line["metric"] == "head.score_max" and line["head"] == 6)
        assert drift["last"][-1] > 2 * drift["last"][len(drift["last"]) // 2]
