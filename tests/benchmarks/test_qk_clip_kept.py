"""The benchmark of QK-Clip's pass over all rows, at a tiny size."""

from typing import Any

import pytest
from torch import Tensor

from foreshock.benchmarks import qk_clip_kept
from foreshock.benchmarks.agent_models import Shape
from foreshock.monitor.attention import probe
from foreshock.monitor.attention.probed_rows import raise_largest

TINY = Shape("tiny", 2, 32, 4, 4, 32, 61, 16, 2, gated=False, whole=False)


def test_every_other_step_looks_at_all_rows_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Tensor] = []

    def noted(largest: Tensor, *given: Any) -> None:
        looks.append(largest)
        raise_largest(largest, *given)

    monkeypatch.setattr(probe, "raise_largest", noted)
    step, _ = qk_clip_kept.measure(TINY, pairs=3)
    assert step > 0
    assert len(looks) == (3 + 1) * TINY.layers
