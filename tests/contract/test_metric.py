"""How an entry is read from a head's counts: shares, means, the worst head; unknown where nothing was counted."""

import numpy as np
import pytest

from foreshock.contract.metrics.catalog import BY_KEY, METRICS, read
from foreshock.contract.metrics.head_metrics import HEAD_METRICS
from foreshock.contract.metrics.metric import Metric
from foreshock.contract.slots import Slot, identity_row


@pytest.mark.parametrize("metric", HEAD_METRICS, ids=lambda metric: metric.key)
def test_a_head_that_counted_nothing_reads_as_unknown_never_as_zero(metric: Metric) -> None:
    assert metric.head is not None
    if metric.head.read is None:
        assert metric.head.field is not None
        return
    value = metric.head.read(identity_row()[None])
    counts = metric.key.startswith("head.nonfinite_")
    assert value.tolist() == [0.0] if counts else np.isnan(value).all()


def test_offset_and_ties_are_ratios_of_what_was_counted() -> None:
    words = identity_row()[None].copy()
    words[0, Slot.ROWS] = 4
    words[0, Slot.TIED_ROWS_BF16] = 1
    words.view(np.float64)[0, Slot.SCORE_OFFSET_SUM] = 6.0
    words.view(np.float64)[0, Slot.SCORE_OFFSET_SUMSQ] = 16.0
    found = {m.key: read(m.key, words)[0] for m in HEAD_METRICS if m.head and m.head.read}
    assert found["head.score_offset"] == 1.5
    assert found["head.score_offset_rms"] == 2.0
    assert found["head.tied_rows_bf16"] == 0.25


def test_ties_and_shifts_are_shares_of_the_rows_that_a_cadence_did_not_skip() -> None:
    words = np.tile(identity_row(), (3, 1))
    words[:, Slot.ROWS], words[:, Slot.SKIPPED_ROWS] = 90, (70, 90, 0)
    for slot in (Slot.TIED_ROWS_BF16, Slot.TIED_ROWS_ONE, Slot.SHIFTED_ROWS):
        words[:, slot] = 5, 0, 9
    words.view(np.float64)[:, Slot.SCORE_OFFSET_SUM] = 45.0
    for key in ("head.tied_rows_bf16", "head.tied_rows_one", "head.shifted_rows"):
        np.testing.assert_array_equal(read(key, words), [0.25, np.nan, 0.1])
    assert read("head.score_offset", words).tolist() == [0.5] * 3


def test_only_per_head_metrics_have_a_value_per_layer() -> None:
    with pytest.raises(ValueError, match="not a per-head metric"):
        _ = BY_KEY["run.loss"].layer_name


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.key)
def test_an_entry_says_nothing_that_its_kind_cannot_keep(metric: Metric) -> None:
    sources = [metric.head, metric.sample, metric.worst_of]
    assert sum(source is not None for source in sources) <= 1
    if metric.worst_of:
        of = BY_KEY[metric.worst_of]
        assert of.head is not None
        assert (metric.levels, metric.scale, metric.unit) == (of.levels, of.scale, of.unit)
    if metric.head is not None:
        assert metric.across_ranks != "mean"  # ranks are merged one by one, and a mean of means is no mean
    if metric.percent:
        assert metric.unit == "ratio"
    if metric.signed:
        assert metric.scale != "log"


def test_the_worst_head_of_a_signed_metric_is_the_largest_in_size() -> None:
    values = np.array([1.0, -7.0, 3.0, np.nan])
    assert BY_KEY["head.score_offset"].badness(values)[1] == 7.0
    assert BY_KEY["head.score_max"].badness(values)[1] == -7.0
