"""What a probe costs beside a step, counted and not timed: products of matrices, and numbers that are written.

`foreshock bench agent` times it on a GPU.
"""

from typing import Any

import pytest
import torch
from tests.monitor.tiny_models import CausalSelfAttention, TinyGPT, tiny_gpt
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from foreshock.monitor import AgentConfig, attach
from foreshock.monitor.attention import probe
from foreshock.monitor.attention.backend_selector import GRADIENTS_EVERY

SHARE = 0.05
"""Of a step's products at most, in the mean of all steps."""
PASSES = 20
"""Numbers that are written for each score and each feature of a measured row, at most."""


class Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers that operations wrote."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if not func.is_view:
            outputs = given if isinstance(given, tuple | list) else (given,)
            self.numbers += sum(out.numel() for out in outputs if isinstance(out, Tensor))
        return given


def step(model: TinyGPT, ids: Tensor) -> tuple[int, int]:
    """Floating-point operations of a forward and backward's matrix products, and numbers written."""
    with FlopCounterMode(display=False) as flops, Written() as written:  # type: ignore[no-untyped-call]
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
    return flops.get_total_flops(), written.numbers


@pytest.mark.parametrize(("width", "heads", "rows", "length"), [(192, 6, 4, 63), (256, 4, 32, 256), (128, 2, 2, 512)])
def test_at_the_defaults_a_probe_takes_a_twentieth_of_the_products_of_a_step_at_most_and_few_passes_over_its_scores(
    monkeypatch: pytest.MonkeyPatch, width: int, heads: int, rows: int, length: int
) -> None:
    monkeypatch.setattr(probe, "_operator", probe.probe_rows)  # what happens inside an operator is not seen
    ids = torch.randint(48, (rows, length), generator=torch.Generator().manual_seed(0))

    class Block(torch.nn.Module):
        """Attention and the layers that follow it."""

        def __init__(self) -> None:
            super().__init__()
            self.attention = CausalSelfAttention(width, heads)
            self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norms[0](x))
            out: Tensor = self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))
            return out

    model = tiny_gpt(Block(), width=width)
    plain_flops, plain_written = step(model, ids)
    every = AgentConfig().sample_every_steps
    with attach(model, run="cost", attention="keep", quiet=True, strict=True) as agent:
        compared_flops, compared_written = step(model, ids)  # the first step is measured, and its gradients compared
        agent.step()
        model.zero_grad()
        other_flops, other_written = step(model, ids)
    with attach(model, run="cost", attention="keep", quiet=True, strict=True) as agent:
        agent._attached.selector._sampling.gradients = False
        flops, written = step(model, ids)
    assert (other_flops, other_written - plain_written) == (plain_flops, 1)  # of its one layer
    mean_flops = flops - plain_flops + (compared_flops - flops) / GRADIENTS_EVERY
    assert 0 < mean_flops <= SHARE * every * plain_flops
    measured = min(rows * length, AgentConfig().probe_rows)
    most = PASSES * measured * (heads * length + width)
    assert 0 < written - plain_written <= most
    assert 0 < (compared_written - written) / GRADIENTS_EVERY <= most / 10
