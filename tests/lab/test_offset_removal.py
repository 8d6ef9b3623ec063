"""An offset is taken out of the scores, and the probabilities do not notice."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foreshock.kernels.flash_attention import flash_attention
from foreshock.lab.training.arm import CONTROL, find_arm
from foreshock.lab.training.capture import Capture
from foreshock.lab.training.corpus import standard_library
from foreshock.lab.training.model import ModelConfig
from foreshock.lab.training.offset_removal import Removed, centred, remove_offset
from foreshock.lab.training.recipes import find_recipe
from foreshock.lab.training.run import Training
from foreshock.monitor import Agent, attach

TINY = replace(find_recipe("key-bias-small"), model=ModelConfig(layers=2, heads=2, width=16, context=16), batch=4)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("offset", [1.0, 1e3])
def test_a_constant_taken_from_the_keys_changes_neither_output_nor_other_gradients(seed: int, offset: float) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, value, grad = normal(2, 4, 9, 8).requires_grad_(), normal(2, 2, 9, 8).requires_grad_(), normal(2, 4, 9, 8)
    key = (normal(2, 2, 9, 8) + offset * normal(1, 2, 1, 8)).requires_grad_()

    def results(key: Tensor) -> list[Tensor]:
        out = flash_attention(query, key, value, causal="top_left", numerics="float64")
        return [out, *torch.autograd.grad(out, (query, value), grad, retain_graph=True)]

    shift = offset * normal(1, 2, 1, 8)
    plain = results(key)
    for other in (results(key - shift), results(centred(key))):
        for got, expected in zip(other, plain, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-11 * max(1.0, offset))


def test_centred_keys_leave_no_gradient_along_the_direction_that_softmax_cannot_see() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 12, 8, dtype=torch.bfloat16) for _ in range(3))
    key.add_(5.0).requires_grad_()
    sums = {}
    for name, given in (("plain", key), ("centred", centred(key))):
        out = flash_attention(query, given, value, causal="top_left", numerics="kernel")
        (grad,) = torch.autograd.grad(out, key, torch.randn(out.shape, dtype=out.dtype), retain_graph=True)
        sums[name] = float(grad.float().sum(2).norm() / grad.float().norm())
    assert sums["plain"] > 0
    assert sums["centred"] < 0.01  # what is left is the gradient's own rounding to bf16


def test_the_mean_of_centred_keys_is_zero_for_every_head_alone() -> None:
    key = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(1)) + torch.tensor([10.0, -3.0]).view(2, 1, 1)
    torch.testing.assert_close(centred(key).mean(2), torch.zeros(3, 2, 4), rtol=0, atol=1e-5)
    assert centred(key.bfloat16()).dtype == torch.bfloat16


@pytest.fixture
def drifted() -> Iterator[Training]:
    """A run in float32 whose first layer has been given a key bias of several nats."""
    training = Training(TINY, CONTROL, 1, corpus=standard_library())
    for _ in range(3):
        training.advance()
    with torch.no_grad():
        for layer, scale in enumerate((3.0, 0.5)):
            bias = torch.randn(48, generator=torch.Generator().manual_seed(2))
            training.model.get_parameter(f"h.{layer}.attn.c_attn.bias").copy_(scale * bias)
            training.model.get_parameter(f"h.{layer}.attn.c_attn.weight")[:32].mul_(20.0)
    yield training
    training.agent.close("stopped")


def offsets(training: Training) -> Tensor:
    """Mean score of each head above that of its keys without their bias, [layers, heads]."""
    with Capture(training.model) as capture, torch.no_grad():
        training.peek_loss()
    return torch.stack([(call.query @ call.key.mT).mean((0, 2, 3)) * call.spec.scale for call in capture.calls])


def test_a_key_bias_is_removed_and_the_model_computes_what_it_did(drifted: Training) -> None:
    before, moved = drifted.peek_loss().item(), offsets(drifted)
    removed = remove_offset(drifted.model, drifted.peek_loss)
    assert [(each.layer, each.kv_head) for each in removed] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert max(abs(each.offset_before) for each in removed) > 1
    assert drifted.peek_loss().item() == pytest.approx(before, rel=1e-5)
    taken = torch.tensor([each.offset_before for each in removed]).view(2, 2)
    torch.testing.assert_close(moved - offsets(drifted), taken, rtol=1e-3, atol=1e-3)


def test_only_the_named_head_is_touched_and_its_momentum_forgotten(drifted: Training) -> None:
    bias = drifted.model.get_parameter("h.0.attn.c_attn.bias")
    [optimizer] = drifted.optimizers
    state = optimizer.state[bias]
    before, momentum, second = (x.detach().clone() for x in (bias, state["exp_avg"], state["exp_avg_sq"]))
    [removed] = remove_offset(drifted.model, drifted.peek_loss, [(0, 1)], drifted.optimizers)
    of_head = torch.zeros(48, dtype=torch.bool)
    of_head[24:32] = True
    assert removed.bias_norm == pytest.approx(float(before[of_head].norm()))
    assert not bias[of_head].any()
    assert not state["exp_avg"][of_head].any()
    assert torch.equal(bias[~of_head], before[~of_head])
    assert torch.equal(state["exp_avg"][~of_head], momentum[~of_head])
    assert torch.equal(state["exp_avg_sq"], second)


class Separate(nn.Module):
    """Grouped queries, separate projections; `turn` is done to queries and keys after their bias."""

    def __init__(self, turn: Callable[[Tensor], Tensor] = lambda x: x, *, bias: bool = True) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, 2, 8
        self.q_proj = nn.Linear(32, 32)
        self.k_proj = nn.Linear(32, 16, bias=bias)
        self.v_proj = nn.Linear(32, 16)
        self.norm = nn.LayerNorm(32)
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        parts = (p(x).unflatten(2, (-1, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = parts
        out = F.scaled_dot_product_attention(self.turn(query), self.turn(key), value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


def rotated(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[2])[:, None] / 10.0 ** torch.arange(4)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(turned, -1).flatten(-2)


def watched(module: nn.Module) -> tuple[Agent, Callable[[], Tensor]]:
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))

    def loss() -> Tensor:
        result = module(x)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.square().mean()

    return attach(module, attention="kernels", quiet=True, url=None, spool_directory=None, numerics="float32"), loss


def test_query_heads_that_share_a_key_head_share_its_bias() -> None:
    module = Separate()
    agent, loss = watched(module)
    with agent:
        before = loss().item()
        [removed] = remove_offset(module, loss, [(0, 2), (0, 3)])
        assert removed.kv_head == 1
        assert loss().item() == pytest.approx(before, rel=1e-5)
    assert not module.k_proj.bias[8:].any()
    assert module.k_proj.bias[:8].all()


def test_the_key_bias_of_multihead_attention_is_found_in_its_fused_bias() -> None:
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    nn.init.normal_(module.in_proj_bias)
    agent, _ = watched(module)
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    with agent:
        removed: list[Removed] = remove_offset(module, lambda: module(x, x, x, need_weights=False)[0].sum())
    assert len(removed) == 4
    assert not module.in_proj_bias[32:64].any()
    assert module.in_proj_bias[:32].all()
    assert module.in_proj_bias[64:].all()


@pytest.mark.parametrize(
    "module", [Separate(rotated), Separate(lambda x: F.normalize(x, dim=-1)), Separate(bias=False)]
)
def test_what_cannot_be_removed_unseen_is_refused_and_left_as_it_was(module: nn.Module) -> None:
    agent, loss = watched(module)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with agent, pytest.raises(ValueError, match="has no bias on its keys that reaches attention unturned"):
        remove_offset(module, loss)
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_a_head_that_does_not_exist_is_refused_with_those_that_do(drifted: Training) -> None:
    with pytest.raises(ValueError, match="no layer 0 head 2; the model has layer 0 with 2 heads, layer 1 with 2 heads"):
        remove_offset(drifted.model, drifted.peek_loss, [(0, 2)])


def test_a_model_that_nobody_watches_is_refused() -> None:
    with pytest.raises(ValueError, match="Separate is not watched"):
        remove_offset(Separate(), lambda: torch.zeros(()))


def test_a_mode_that_centres_keys_moves_no_probability(drifted: Training) -> None:
    assert offsets(drifted).abs().max() > 1
    before = drifted.peek_loss().item()
    drifted.agent.set_mode(drifted.agent.modes(), "centred_keys", reason="test")
    assert drifted.peek_loss().item() == pytest.approx(before, rel=1e-5)


def test_an_arm_of_a_mode_counts_as_cured() -> None:
    assert TINY.truth_of(find_arm("paper-centred-keys")) == "healthy"
    assert TINY.truth_of(find_arm("paper")) == "rounding"
