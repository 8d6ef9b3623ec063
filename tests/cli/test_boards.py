"""Boards and rules written for other addresses."""

from pathlib import Path

from tests.cli.typed import foreshock


def test_boards_and_rules_are_written_elsewhere_for_other_addresses_that_a_link_can_lead_to(tmp_path: Path) -> None:
    for option in ("--grafana-url", "--service-url", "--runbooks-url"):
        done = foreshock("dashboards", "generate", "--out", str(tmp_path), option, "foreshock.example")
        assert done.exit_code == 1
        assert "'foreshock.example' is not an address; use http:// or https://" in done.stderr
    assert list(tmp_path.iterdir()) == []
    addresses = ["--grafana-url", "https://g.example", "--service-url", "https://s.example/"]
    every = [*addresses, "--runbooks-url", "https://r.example"]
    assert foreshock("dashboards", "generate", "--out", str(tmp_path), *every).exit_code == 0
    rules = (tmp_path / "prometheus-rules.yml").read_text()
    assert "https://g.example/d/foreshock-run" in rules
    assert "https://s.example/?runs=" in rules
    assert "runbook_url: https://r.example/ForeshockRunHung.html" in rules
    assert "127.0.0.1" not in rules
    assert foreshock("dashboards", "generate", *addresses).exit_code == 2
