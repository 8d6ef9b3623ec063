"""The metric catalogue: stable names, consistent entries, and NaN for values that were not measured."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.state_words import edge_values

import foreshock.monitor.config
from foreshock.contract.metrics.catalog import BY_KEY, EXTRA_ALERTS, METRICS, read
from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.metrics.metric import DROP_REASONS, FAULT_COMPONENTS, OTHER, SIGNALS, Metric, known, ratio
from foreshock.contract.slots import Floats, Slot, identity_row
from foreshock.monitor.detect.growth import SIGNAL_NAMES
from foreshock.monitor.detect.levels import KERNEL, LEVEL
from foreshock.monitor.detect.non_finite import NON_FINITE

STABLE = Path(__file__).with_name("stable_metrics.txt")
MONITOR = Path(foreshock.monitor.config.__file__ or "").parent
FROM_STATE_WORDS = [metric.key for metric in HEAD_METRICS if metric.head is not None and metric.head.read is not None]


def rendered(metric: Metric) -> str:
    names = [metric.name] + ([metric.layer_name] if metric.head else [])
    return "\n".join(f"{name} {metric.kind} {','.join(metric.labels)}" for name in names)


def test_metric_names_labels_and_kinds_are_unique_and_match_the_stable_list() -> None:
    assert STABLE.read_text() == "\n".join(rendered(metric) for metric in METRICS) + "\n", (
        "a metric changed; users depend on these names. If it is meant, update stable_metrics.txt"
    )
    lines = STABLE.read_text().splitlines()
    assert len(BY_KEY) == len(METRICS)
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.key)
def test_catalog_entry_is_consistent_and_follows_the_naming_rules(metric: Metric) -> None:
    assert re.fullmatch(r"foreshock(_[a-z0-9]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.help.rstrip().endswith((".", "(Unix time)."))
    assert metric.bad.endswith(".")
    sources = [metric.head, metric.sample, metric.worst_of]
    assert sum(source is not None for source in sources) <= 1
    if metric.worst_of:
        of = BY_KEY[metric.worst_of]
        assert of.head is not None
        assert (metric.levels, metric.scale, metric.unit) == (of.levels, of.scale, of.unit)
    if metric.head is not None:
        assert metric.across_ranks != "mean"  # ranks are merged one by one, and a mean of means is not the mean
    assert not metric.percent or metric.unit == "ratio"
    assert not metric.signed or metric.scale != "log"


def test_alert_names_are_unique_and_every_alert_has_its_texts() -> None:
    alerts = [alert for metric in METRICS for alert in metric.alerts] + list(EXTRA_ALERTS)
    assert len({alert.name for alert in alerts}) == len(alerts)
    assert all(alert.action and alert.summary and alert.description for alert in alerts)


def test_metrics_without_head_statistics_have_no_reader_and_no_layer_name() -> None:
    with pytest.raises(ValueError, match=r"head\.risk is not computed from the statistics of a head"):
        read("head.risk", identity_row()[None])
    with pytest.raises(ValueError, match="not a per-head metric"):
        _ = BY_KEY["run.loss"].layer_name


@pytest.mark.parametrize("key", FROM_STATE_WORDS)
def test_metrics_of_a_head_without_samples_are_nan_except_nonfinite_counts(key: str) -> None:
    value = read(key, identity_row()[None])
    assert value.tolist() == [0.0] if key.startswith("head.nonfinite_") else np.isnan(value).all()


def test_offsets_and_ties_are_divided_by_the_rows_that_were_not_skipped() -> None:
    words = np.tile(identity_row(), (3, 1))
    words[:, Slot.ROWS], words[:, Slot.SKIPPED_ROWS] = 90, (70, 90, 0)
    for slot in (Slot.TIED_ROWS_BF16, Slot.TIED_ROWS_ONE, Slot.SHIFTED_ROWS):
        words[:, slot] = 5, 0, 9
    words.view(np.float64)[:, Slot.SCORE_OFFSET_SUM] = 45.0
    words.view(np.float64)[:, Slot.SCORE_OFFSET_SUMSQ] = 360.0
    for key in ("head.tied_rows_bf16", "head.tied_rows_one", "head.shifted_rows"):
        np.testing.assert_array_equal(read(key, words), [0.25, np.nan, 0.1])
    assert read("head.score_offset", words).tolist() == [0.5] * 3
    assert read("head.score_offset_rms", words).tolist() == [2.0] * 3


@given(part=st.lists(edge_values, min_size=6, max_size=6), whole=st.lists(edge_values, min_size=6, max_size=6))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ratio_is_nan_if_the_denominator_is_zero(part: list[float], whole: list[float]) -> None:
    def quotients(parts: Floats, wholes: Floats) -> list[float]:
        return [p / w if w != 0 else np.nan for p, w in zip(parts, wholes, strict=True)]

    for wholes in (np.array(whole), np.abs(np.nan_to_num(np.array(whole))) + 1.0):
        np.testing.assert_array_equal(ratio(np.array(part), wholes), quotients(np.array(part), wholes))


def matches_in_agent_sources(pattern: str) -> set[str]:
    """Texts in the agent's sources that match the pattern's group."""
    return {found for path in MONITOR.rglob("*.py") for found in re.findall(pattern, path.read_text("utf-8"))}


def test_labels_of_the_agent_are_known_and_unknown_labels_become_other() -> None:
    reasons = matches_in_agent_sources(r'dropped\["([a-z_]+)"')
    assert {"queue_full", "spool_lost", "unbuilt"} <= reasons <= set(DROP_REASONS)
    components = (
        matches_in_agent_sources(r'faults\["([a-z_]+)"')
        | matches_in_agent_sources(r'Guard\("([a-z_]+)"')
        | matches_in_agent_sources(r'self\._guards\["([a-z_]+)"')
    )
    assert {"agent", "detectors", "spool", "probe"} <= components <= set(FAULT_COMPONENTS)
    assert {*SIGNAL_NAMES, NON_FINITE, LEVEL, KERNEL} == set(SIGNALS)
    assert (known("score", SIGNALS), known("score ", SIGNALS), known("", SIGNALS)) == ("score", OTHER, OTHER)
