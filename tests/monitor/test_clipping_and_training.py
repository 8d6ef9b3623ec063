"""QK-Clip in a small training whose learning rate is too high: the scores stay where it holds them."""

from dataclasses import replace
from typing import Any

import pytest
from tests.monitor.doubles import Listener
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import Slot, slot_values
from foreshock.lab.training import model as lab_model
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Training
from foreshock.lab.training.variant import UNTREATED

pytestmark = pytest.mark.full
TAU, STEPS = 100.0, 300


class WithTorchsLinear(lab_model.CausalSelfAttention):
    """With a projection of PyTorch's, whose forward is known: QK-Clip scales no other."""

    def __init__(self, config: lab_model.ModelConfig) -> None:
        super().__init__(config)
        self.c_attn = nn.Linear(config.width, 3 * config.width, bias=False)  # type: ignore[assignment]

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2).to(self.operand)
            for each in self.c_attn(x).chunk(3, -1)
        )
        return query, key, value


def largest_scores(**settings: Any) -> tuple[list[float], float]:
    """The largest score of each sample, and the mean loss of the last 50 steps."""
    small = find_recipe("key-bias-small")
    recipe = replace(small, model=replace(small.model, qkv_bias=False), learning_rate=0.064, steps=STEPS)
    training, listener = Training(recipe, UNTREATED, 1, **settings), Listener()
    training.agent.subscribe(listener)
    losses: list[Tensor] = [training.advance().detach().clone() for _ in range(STEPS)]
    training.agent.close()
    words = [sample.words() for sample in listener.of(wire.Sample)]
    scores = [float(slot_values(each, Slot.SCORE_MAX).max()) for each in words if each is not None]
    return scores, sum(map(float, losses[-50:])) / 50


def test_at_a_rate_that_is_too_high_scores_stay_below_twice_the_threshold_and_pass_a_thousand_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lab_model, "CausalSelfAttention", WithTorchsLinear)
    without, loss_without = largest_scores()
    clipped, loss = largest_scores(qk_clip="always", qk_clip_threshold=TAU)
    assert max(without) > 1000
    assert max(clipped) < 2 * TAU
    assert loss < loss_without
