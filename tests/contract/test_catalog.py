"""One metric, one entry; the names that people build on do not change by accident."""

import re
from pathlib import Path

import pytest

from foreshock.contract.metrics.catalog import BY_KEY, EXTRA_ALERTS, METRICS, read
from foreshock.contract.metrics.metric import Metric
from foreshock.contract.slots import identity_row

STABLE = Path(__file__).with_name("stable_metrics.txt")


def rendered(metric: Metric) -> str:
    names = [metric.name] + ([metric.layer_name] if metric.head else [])
    return "\n".join(f"{name} {metric.kind} {','.join(metric.labels)}" for name in names)


def test_names_labels_and_kinds_are_the_committed_ones() -> None:
    assert STABLE.read_text() == "\n".join(rendered(metric) for metric in METRICS) + "\n", (
        "a metric changed; users depend on these names. If it is meant, update stable_metrics.txt"
    )


def test_keys_and_names_are_unique() -> None:
    assert len(BY_KEY) == len(METRICS)
    names = [name for metric in METRICS for name in rendered(metric).splitlines()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.key)
def test_a_metric_follows_the_naming_rules_and_says_what_bad_looks_like(metric: Metric) -> None:
    assert re.fullmatch(r"foreshock(_[a-z0-9]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.help.rstrip().endswith((".", "(Unix time)."))
    assert metric.bad.endswith(".")


def test_alert_names_are_unique_and_each_says_what_to_do() -> None:
    alerts = [alert for metric in METRICS for alert in metric.alerts] + list(EXTRA_ALERTS)
    assert len({alert.name for alert in alerts}) == len(alerts)
    assert all(alert.action and alert.summary and alert.description for alert in alerts)


def test_only_what_was_counted_is_read_from_words() -> None:
    with pytest.raises(ValueError, match=r"head\.risk is not computed from the statistics of a head"):
        read("head.risk", identity_row()[None])
