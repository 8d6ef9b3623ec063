"""`foreshock dashboards generate` with custom addresses."""

from pathlib import Path

from tests.cli.typed import foreshock


def test_dashboards_generate_uses_given_addresses_and_rejects_invalid_ones(tmp_path: Path) -> None:
    for option in ("--grafana-url", "--service-url", "--runbooks-url"):
        done = foreshock("dashboards", "generate", "--out", str(tmp_path), option, "foreshock.example")
        assert done.exit_code == 1
        assert "'foreshock.example' is not an address; use http:// or https://" in done.stderr
    assert list(tmp_path.iterdir()) == []
    addresses = ["--grafana-url", "https://g.example", "--service-url", "https://s.example/"]
    options = [*addresses, "--runbooks-url", "https://r.example"]
    assert foreshock("dashboards", "generate", "--out", str(tmp_path), *options).exit_code == 0
    rules = (tmp_path / "prometheus-rules.yml").read_text()
    assert "https://g.example/d/foreshock-run" in rules
    assert "https://s.example/?runs=" in rules
    assert "runbook_url: https://r.example/ForeshockRunHung.html" in rules
    assert "127.0.0.1" not in rules
    assert foreshock("dashboards", "generate", *addresses).exit_code == 2
