"""Recorded runs thinned as a cadence would: what is drawn, and what the table says of a run that warns."""

from pathlib import Path

import numpy as np
import pytest
from tests.lab.made_up import record

from foreshock.contract.slots import Slot, identity_row
from foreshock.lab.recording.trace import read_trace
from foreshock.lab.scoring import thinned as module
from foreshock.lab.scoring.thinned import thin, thinned


def test_thinned_counts_keep_their_share_and_the_sum_its_mean() -> None:
    heads = 4000
    words = np.tile(identity_row(), (heads, 1))
    words[:, Slot.ROWS], words[:, Slot.TIED_ROWS_BF16] = 12_800, 3200
    floats = words.view(np.float64)
    floats[:, Slot.DELTA_BIAS_SUM], floats[:, Slot.DELTA_BIAS_SUMSQ] = 256.0, 12_800.0
    for alike in (1, 128):
        found = thin(words, np.full(heads, 4.0), alike, np.full(heads, 1.0), np.random.default_rng(alike))
        looked = found[:, Slot.ROWS] - found[:, Slot.SKIPPED_ROWS]
        assert (looked == 3200).all()
        share = found[:, Slot.TIED_ROWS_BF16] / looked
        assert share.mean() == pytest.approx(0.25, abs=0.005)
        units = 3200 / alike
        assert share.std() == pytest.approx(np.sqrt(0.25 * 0.75 / units * 0.75), rel=0.1)
        total = found.view(np.float64)[:, Slot.DELTA_BIAS_SUM] * 4
        spread = 12_800 - 256**2 / 12_800
        assert total.mean() == pytest.approx(256, abs=4 * np.sqrt(3 * spread / heads))
        assert total.std() == pytest.approx(np.sqrt(3 * spread), rel=0.1)
        assert (thin(words, np.ones(heads), alike, np.ones(heads), np.random.default_rng(0)) == words).all()


def test_the_table_says_how_much_was_looked_at_and_leaves_small_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        read_trace(record(tmp_path / f"{name}.jsonl.gz", fails=name == "fails", split="tuning"))
        for name in ("f", "fails")
    ]
    with pytest.raises(ValueError, match="none of these runs has 16384 rows"):
        thinned(runs, seeds=1)
    monkeypatch.setattr(module, "LEAST_ROWS", 50)
    whole, *rows = thinned(runs, [4], seeds=1)
    assert (whole.every, whole.looked, whole.moved, whole.lost, whole.added) == (1, 1.0, 0, 0, 0)
    assert whole.warnings == 1
    always = [each for each in rows if each.policy == "always"]
    assert [each.alike for each in always] == [1, 128]
    assert always[0].looked == pytest.approx(0.25, abs=0.01)
