"""The benchmark of QK-Clip, at a size for a CPU."""

import math

import pytest
import torch

from foreshock.benchmarks.agent_models import Model, Shape
from foreshock.benchmarks.qk_clip import _JUST_PAST, THRESHOLD, Clipped, measure

TINY = Shape("tiny", 2, 32, 4, 4, 32, 61, 16, 2, gated=False, whole=False, block_steps=2)


@pytest.mark.parametrize(("score", "times"), [(-math.inf, 0), (_JUST_PAST, 1), (4 * THRESHOLD, 1)])
def test_the_act_is_made_at_every_head_or_at_none(score: float, times: int) -> None:
    model = Model(TINY)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    clipped = Clipped(model, score)
    clipped.act()
    assert clipped.clip.done[1].tolist() == [times] * 8
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert same == (score < 4 * THRESHOLD)  # just past the threshold every number is written as it was


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_every_arm_is_timed() -> None:
    figures = measure(TINY, 1, "cpu", "eager")
    torch._dynamo.reset()
    assert all(figures["step_milliseconds"][arm] > 0 for arm in ("agent", "idle", "all_heads"))
    assert all(figures["act_on_host_milliseconds"][arm] > 0 for arm in ("idle", "all_heads"))
