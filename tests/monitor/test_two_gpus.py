"""A model whose layers lie on two GPUs, not all on the current one: what arrives is what was there."""

import numpy as np
import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.tiny_models import batch, next_token_loss, tiny_gpt
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.monitor import attach

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class Spread(nn.Module):
    """A tiny GPT whose second block and head lie on another GPU."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.gpt = tiny_gpt().to(first)
        self.second = second
        self.gpt.blocks[1].to(second)
        self.gpt.head.to(second)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.gpt.embedding(ids.to(self.gpt.embedding.weight.device))
        x = (x + self.gpt.blocks[0](x)).to(self.second)
        return self.gpt.head(x + self.gpt.blocks[1](x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("first", "second"), [("cuda:1", "cuda:1"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")])
def test_losses_and_norms_of_every_gpu_arrive_as_they_were(first: str, second: str) -> None:
    model, heard, losses = Spread(first, second), Listener(), []
    with attach(model, sample_every_steps=1, sample_every_seconds=0.0, norms_every_steps=1, quiet=True) as agent:
        agent.subscribe(heard)
        for step in range(1, 30):
            ids = batch(step)
            loss = next_token_loss(model(ids), ids.to(second))
            torch.autograd.backward(loss)
            losses.append(loss.detach())
            agent.step(loss)
        faults = dict(agent.faults)
    samples = heard.of(wire.Sample)
    assert faults == {}
    np.testing.assert_allclose([sample.loss for sample in samples], [float(loss) for loss in losses], rtol=1e-6)
    norms = samples[0].query_norm
    assert norms is not None
    assert np.isfinite(norms.numpy()).all()
