"""QK-Clip by what a model makes of queries and keys: scaled as a float64 loop has it, or refused with a sentence."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.monitor.test_clipping import EVERY, TAU, two_layers
from tests.monitor.test_foreign_models import DECODER, EXPERTS, LATENT, logits_and_gradients, tiny
from tests.monitor.tiny_models import CausalSelfAttention, batch, train_step
from torch import Tensor, nn

from foreshock.monitor import attach


class Adapted(nn.Linear):
    """A projection with an adapter, as loralib writes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        self.lora_A = nn.Parameter(torch.randn(2, base.in_features))
        self.lora_B = nn.Parameter(torch.randn(base.out_features, 2))
        self.lora_alpha, self.r = 2, 2

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight + self.lora_B @ self.lora_A)


def with_adapters() -> nn.Module:
    model: Any = tiny("Llama", **DECODER)
    for block in model.model.layers:
        block.self_attn.q_proj = Adapted(block.self_attn.q_proj)
    return model  # type: ignore[no-any-return]


def tied() -> nn.Module:
    model: Any = tiny("Llama", **DECODER)
    first, second = (block.self_attn for block in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    return model  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "norms of queries and keys": (
        lambda: tiny("Qwen3", **DECODER),
        "its scores do not follow from its weights (separate (q_proj, k_proj), norms of the weights only: "
        "heads are normalised)",
    ),
    "adapters": (with_adapters, "q_proj is tests's Adapted, which has adapters"),
    "weights that layers share": (tied, "it shares W_Q or W_K with layer"),
    "sinks": (lambda: tiny("GptOss", **DECODER, **EXPERTS, sliding_window=4), "it passes s_aux, which is not probed"),
}


@pytest.mark.parametrize("attention", ["keep", "kernels"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_scaled_rightly_is_left_as_it_is_and_named_with_the_reason(kind: str, attention: Any) -> None:
    make, why = REFUSED[kind]
    model = make()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    settings = EVERY | {"attention": attention, "qk_clip": "always", "qk_clip_threshold": 1e-6}
    with attach(model, **settings, qk_clip_every_steps=1) as agent:
        for _ in range(2):
            logits_and_gradients(model, {})
            agent.step()
        assert why in agent.report().partition("left out: ")[2]
        assert agent.faults == {}
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("norms_every_steps", [0, 1])
@pytest.mark.parametrize(
    ("kind", "sizes", "projection"),
    [("Llama", {}, "q_proj"), ("DeepseekV3", LATENT | {"head_dim": LATENT["qk_rope_head_dim"]}, "kv_b_proj")],
)
def test_adapters_that_are_put_on_after_a_call_showed_the_layout_end_the_scaling_also_where_no_norms_are_read(
    kind: str, sizes: dict[str, Any], projection: str, norms_every_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = tiny(kind, **DECODER | sizes)
    settings = EVERY | {"qk_clip": "always", "qk_clip_threshold": 1e-6, "norms_every_steps": norms_every_steps}

    def scalings(agent: Any) -> int:
        """How often heads were scaled in all, after a step more."""
        logits_and_gradients(model, {})
        agent.step()
        return sum(times for _, _, times, _ in agent.state_dict()["qk_clip"]["done"])

    with attach(model, **settings) as agent:
        before = [scalings(agent) for _ in range(3)][-1]
        assert before > 0
        for block in model.model.layers:
            setattr(block.self_attn, projection, Adapted(getattr(block.self_attn, projection)))
        assert [scalings(agent) for _ in range(2)] == [before] * 2
        assert f"{projection} is tests's Adapted, which has adapters" in agent.report().partition("left out: ")[2]
        assert agent.faults == {}
    assert "QK-Clip leaves out" in caplog.text


@pytest.mark.parametrize("attention", ["keep", "kernels"])
def test_one_module_that_stands_for_two_layers_is_scaled_once_by_the_larger_score_of_both(attention: Any) -> None:
    shared = CausalSelfAttention(16, 2)
    model, inputs = two_layers(shared, shared), []
    hook = shared.register_forward_pre_hook(lambda module, given: inputs.append(given[0].detach().double()))
    before = shared.c_attn.weight.detach().double()
    bias = shared.c_attn.bias.detach().double()
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = EVERY | {"attention": attention, "qk_clip": "always", "numerics": "float32"}
    with attach(model, **settings, qk_clip_every_steps=1) as agent:
        agent.step(train_step(model, still, 0, batch(0)).detach())
    hook.remove()
    largest = [-math.inf] * 2
    for x in inputs:
        query, key, _ = (x @ before.T + bias).chunk(3, dim=2)
        for head, rows in enumerate((slice(0, 8), slice(8, 16))):
            scores = (query[..., rows] @ key[..., rows].mT / math.sqrt(8)).tril()
            hidden = torch.ones_like(scores).triu(1).bool()
            largest[head] = max(largest[head], float(scores.masked_fill(hidden, -math.inf).max()))
    assert len(inputs) == 2
    assert max(largest) > TAU
    root = [min(1.0, TAU / score) ** 0.5 for score in largest]
    expected = before.clone()
    for side in (0, 16):
        for head, factor in enumerate(root):
            expected[side + 8 * head : side + 8 * head + 8] *= factor
    torch.testing.assert_close(shared.c_attn.weight.detach().double(), expected, rtol=1e-5, atol=0)
