"""How layers stand, sample by sample: who counts, who stopped and why, and when the table is due."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foreshock.contract.slots import Slot, Words, identity_row
from foreshock.contract.wire import Layer
from foreshock.monitor.attention import watched_layer
from foreshock.monitor.attention.coverage import CoverageReport

HEADS = (2, 1, 3)


@pytest.fixture(autouse=True)
def _nothing_was_called_outside() -> Iterator[None]:
    watched_layer.forget()
    yield
    watched_layer.forget()


def layers() -> list[Layer]:
    return [
        Layer(layer=number, name=f"h.{number}", heads=tuple(range(heads)), kv_heads=heads, head_dim=8, served_by="kept")
        for number, heads in enumerate(HEADS)
    ]


def words(*counted: bool, slot: Slot = Slot.ROWS) -> Words:
    """A sample in which the last head of each such layer counted a row."""
    found = np.repeat(identity_row()[None], sum(HEADS), axis=0)
    ends = np.cumsum(HEADS) - 1
    found[ends[list(counted)], slot] = 1
    return found


def selector(*keeps: bool) -> Any:
    why = "no backward ran through it"
    watched = [SimpleNamespace(sampled=k, unserved={}, ran=True, why_not_counted=why) for k in keeps]
    return SimpleNamespace(
        layers=watched, how_served=lambda n: "native attention, sampled" if keeps[n] else "kernels",
        what_a_switch_meets=list, measured_since=lambda step: True,
    )  # fmt: skip


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return told


@pytest.mark.parametrize("slot", [Slot.ROWS, Slot.EMPTY_ROWS, Slot.NONFINITE_ROWS])
def test_a_layer_counts_where_one_of_its_heads_met_a_row_of_any_kind(slot: Slot) -> None:
    report = CoverageReport(layers(), selector(True, True, True))
    report.record(words(True, False, True, slot=slot), 0, 10)
    lines = report.table().splitlines()
    assert lines[-1] == "watched 2 of 3 attention layers"
    assert "1 x native attention, not measured: no backward ran through it (h.1)" in lines


def test_layers_that_are_sampled_are_not_missed_in_a_step_that_measured_none_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report = CoverageReport(layers(), selector(True, True, False))
    report.record(words(True, True, True), 0, 1)
    report.record(words(False, False, True), 1, 2)  # kernels count in every step, what is kept in one of ten
    assert said(caplog) == []
    report.record(words(True, False, True), 2, 3)
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("pause", [None, 30])
def test_a_long_silence_of_all_is_told_once_and_anew_after_it_ended(
    pause: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    report = CoverageReport(layers(), selector(True, True, True), pause=pause)
    report.record(words(True, True, True), 0, 10)
    told = []
    for step in (20, 30, 40, 50, 60):
        report.record(words(False, False, False), step - 10, step)
        told.append(len(said(caplog)))
    assert told == ([0, 0, 1, 0, 0] if pause else [0] * 5)
    report.record(words(True, True, True), 60, 70)
    for step in (80, 90, 100):
        report.record(words(False, False, False), step - 10, step)
    assert [line.split(":")[1].strip().partition(".")[0] for line in said(caplog)] == (
        ["no attention was recorded since step 70"] if pause else []
    )


@pytest.mark.promise("A24")
def test_layers_dropped_at_random_are_named_a_few_times_and_the_table_becomes_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drawn = np.random.default_rng(0)
    report = CoverageReport(layers(), selector(True, True, True))
    tables = [
        report.table()
        for step in range(1, 400)
        if report.record(words(*(drawn.random(3) < 0.5).tolist()), step - 1, step)
    ]
    assert len(said(caplog)) <= 8
    assert 2 <= len(tables) <= 8
    assert tables[0].splitlines()[-1] != tables[-1].splitlines()[-1] == "watched 3 of 3 attention layers"
    assert not report.table_is_stale


@pytest.mark.promise("A24")
@pytest.mark.parametrize("quiet_samples", [1, 50])
def test_a_layer_that_is_trained_later_stands_in_a_table_at_once(quiet_samples: int) -> None:
    report = CoverageReport(layers(), selector(True, True, True))
    for step in range(quiet_samples):
        assert report.record(words(True, False, True), step, step + 1) == (step == 0)
    assert report.record(words(True, True, True), quiet_samples, quiet_samples + 1)
    assert report.table().splitlines() == [
        "3 x native attention, sampled (h.0, h.1, h.2)",
        "watched 3 of 3 attention layers",
    ]


def test_a_layer_that_stopped_for_good_leaves_the_count_of_those_watched() -> None:
    report = CoverageReport(layers(), selector(True, True, True))
    due = [report.record(words(True, step < 3, True), step - 1, step) for step in range(1, 12)]
    assert due.count(True) == 2
    assert report.table().splitlines() == [
        "2 x native attention, sampled (h.0, h.2)",
        "1 x native attention, sampled; it counted nothing since step 2 (h.1)",
        "watched 2 of 3 attention layers",
    ]


def test_what_no_table_showed_yet_is_known_at_the_end() -> None:
    report = CoverageReport(layers(), selector(True, True, True))
    for step, counts in enumerate([(True, False, False), (True, True, False), (True, True, True)], start=1):
        report.record(words(*counts), step - 1, step)
    assert report.table_is_stale


def test_rows_that_see_no_key_are_named_after_the_first_sample_alone() -> None:
    report = CoverageReport(layers(), selector(True, True, True))
    first = words(True, True, True)
    first[:, Slot.ROWS], first[2, Slot.ROWS], first[2, Slot.EMPTY_ROWS] = 72, 48, 24
    report.record(first, 0, 1)
    assert "24 of 72 measured rows of a head see no key (h.1): the mask hides every key" in report.table()
    healthy = CoverageReport(layers(), selector(True, True, True))
    healthy.record(words(True, True, True), 0, 1)
    healthy.record(first, 1, 2)
    assert "see no key" not in healthy.table()
