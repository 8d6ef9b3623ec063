"""QK-Clip of multi-head latent attention, as in Kimi K2: it scales rows whose layout a call confirmed, or nothing."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.monitor.latent_models import (
    HEADS,
    NOPE,
    ROPE,
    VALUE,
    LatentAttention,
    OwnKeysNormed,
    QueriesNormedPerHead,
    SequenceFirst,
    WithLora,
    heads_of,
    last_inputs_of,
    parts,
    rotate_halves,
    rotate_interleaved_to_halves,
    scores,
    two_latent_layers,
    without_positions,
)
from tests.monitor.test_clipping import SETTINGS
from tests.monitor.tiny_models import batch
from tests.monitor.transformers_models import DECODER, EXPERTS, LATENT, tiny
from torch import Tensor, nn

from foreshock.monitor import AgentConfig, attach

CLIPPING: dict[str, Any] = SETTINGS | {"qk_clip": "always", "numerics": "float32"}
TRANSFORMERS_SIZES = DECODER | LATENT | {"head_dim": LATENT["qk_rope_head_dim"]}
HAND_WRITTEN: dict[str, Callable[[], LatentAttention]] = {
    "DeepSeek's own code": LatentAttention,
    "rotary in halves": lambda: LatentAttention(rotate_halves),
    "rotary pairs reordered into halves": lambda: LatentAttention(rotate_interleaved_to_halves),
    "no positions": lambda: LatentAttention(without_positions),
    "with biases": lambda: LatentAttention(bias=True),
    "sequence before batch": SequenceFirst,
}


@pytest.fixture(autouse=True)
def _every_step_may_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AgentConfig, "qk_clip_every_steps", 1)


def hand_written(kind: str) -> tuple[nn.Module, list[Any], Callable[..., Any]]:
    model = two_latent_layers(HAND_WRITTEN[kind])
    return model, list(model.blocks), lambda block, head: block.rows(head)


def transformers_latent(kind: str, **sizes: Any) -> tuple[nn.Module, list[Any], Callable[..., Any]]:
    model: Any = tiny(kind, **TRANSFORMERS_SIZES | sizes)
    model.config.use_cache = False

    def rows(attention: Any, head: int) -> list[tuple[Any, list[int], str]]:
        nope, width = attention.qk_nope_head_dim, attention.qk_head_dim
        query, key = head * width, head * (nope + attention.v_head_dim)
        query_projection = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
        return [
            (query_projection, list(range(query, query + nope)), "query"),
            (query_projection, list(range(query + nope, query + width)), "query only"),
            (attention.kv_b_proj, list(range(key, key + nope)), "key"),
        ]

    return model, [layer.self_attn for layer in model.model.layers], rows


MODELS: dict[str, Callable[[], tuple[nn.Module, list[Any], Callable[..., Any]]]] = {
    **{kind: lambda kind=kind: hand_written(kind) for kind in HAND_WRITTEN},  # type: ignore[misc]
    "DeepSeek-V2": lambda: transformers_latent("DeepseekV2"),
    "DeepSeek-V2-Lite, queries without a latent": lambda: transformers_latent("DeepseekV2", q_lora_rank=None),
    "DeepSeek-V3": lambda: transformers_latent("DeepseekV3"),
    "DeepSeek-V3, values of another width": lambda: transformers_latent(
        "DeepseekV3", v_head_dim=6, qk_nope_head_dim=12
    ),
    "DeepSeek-V3, rotary in halves": lambda: transformers_latent("DeepseekV3", rope_interleave=False),
    "DeepSeek-V3.2": lambda: transformers_latent("DeepseekV32"),
    "MiniCPM3": lambda: transformers_latent("MiniCPM3"),
    "GLM-4.7-Flash": lambda: transformers_latent("Glm4MoeLite"),
    "Mistral 4": lambda: transformers_latent("Mistral4"),
    "Youtu": lambda: transformers_latent("Youtu"),
}


QUICK = (*HAND_WRITTEN, "DeepSeek-V2-Lite, queries without a latent", "DeepSeek-V3, values of another width")


def step(model: nn.Module, ids: Tensor | None = None) -> None:
    """A forward and a backward without an optimizer step."""
    out: Any = model(batch(0) if ids is None else ids)
    logits = getattr(out, "logits", out)
    torch.autograd.backward(logits.square().mean())


def unscaled_layers(agent: Any) -> str:
    return str(agent.report().partition("not scaled: ")[2])


@pytest.mark.promise("A26")
@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        *((kind, "keep") for kind in QUICK),
        *((kind, "kernels") for kind in HAND_WRITTEN),
        *(pytest.param(kind, "keep", marks=pytest.mark.full) for kind in MODELS if kind not in QUICK),
        *(pytest.param(kind, "kernels", marks=pytest.mark.full) for kind in MODELS if kind not in HAND_WRITTEN),
    ],
)
def test_each_part_of_a_latent_head_is_scaled_so_that_its_scores_scale_by_gamma(kind: str, attention: Any) -> None:
    model, blocks, rows = MODELS[kind]()
    with last_inputs_of(*blocks) as given:
        step(model)
    before = [scores(block, each) for block, each in zip(blocks, given, strict=True)]
    largest = torch.stack([each.amax((0, 2, 3)) for each in before])
    in_order = largest.flatten().sort().values
    tau = float(in_order[3:5].mean())  # some heads are above tau, others below
    gamma = torch.where(largest > tau, tau / largest, 1.0)
    assert 0 < int((gamma < 1).sum()) < gamma.numel()
    expected = {id(p): p.detach().double() for p in model.parameters()}
    for block, head_factors in zip(blocks, gamma.tolist(), strict=True):
        for head, factor in enumerate(head_factors):
            powers = {"query": factor**0.5, "key": factor**0.5, "query only": factor}
            for projection, own_rows, role in rows(block, head):
                for parameter in projection.parameters():  # weight and bias
                    for row in own_rows:
                        expected[id(parameter)][row] = expected[id(parameter)][row] * powers[role]
    weights = {id(p): p.detach().clone() for p in model.parameters()}
    with attach(model, **CLIPPING | {"attention": attention, "qk_clip_threshold": tau}) as agent:
        step(model)
        agent.step()
        assert unscaled_layers(agent) == ""
        assert agent.faults == {}
    for name, parameter in model.named_parameters():
        true = expected[id(parameter)]
        torch.testing.assert_close(parameter.detach().double(), true, rtol=1e-5, atol=0, msg=name)
        same = true == weights[id(parameter)].double()
        assert torch.equal(parameter[same], weights[id(parameter)][same]), name
    for block, each, old, factors in zip(blocks, given, before, gamma, strict=True):
        new = scores(block, each)  # for the same input
        expected_scores = old * factors[:, None, None]
        hidden = expected_scores == float("-inf")
        torch.testing.assert_close(
            new.masked_fill(hidden, 0),
            expected_scores.masked_fill(hidden, 0),
            rtol=1e-4,
            atol=1e-5 * float(largest.max()),
        )


class RoundedLinear(nn.Linear):
    """A projection that rounds its weight in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (4 * self.weight).round() / 4)


def with_projections(name: str, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    model: Any = two_latent_layers()
    for block in model.blocks:
        setattr(block, name, make(getattr(block, name)))
    return model  # type: ignore[no-any-return]


def shared_up_projection() -> nn.Module:
    """Two layers that share the module of their up-projection."""
    model: Any = two_latent_layers()
    model.blocks[1].wkv_b = model.blocks[0].wkv_b
    return model  # type: ignore[no-any-return]


def shared_weight() -> nn.Module:
    """Two layers whose up-projections share a weight."""
    model: Any = two_latent_layers()
    model.blocks[1].wkv_b.weight = model.blocks[0].wkv_b.weight
    return model  # type: ignore[no-any-return]


def rounded(old: nn.Linear) -> nn.Module:
    new = RoundedLinear(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    return new


def frozen(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    model.get_parameter("embedding.weight").requires_grad_()
    return model


class KeysThatAreValues(LatentAttention):
    """Latent attention that uses each head's own keys as values."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, _ = super().heads(x)
        return query, key, key[..., :VALUE]


class PartsFirst(LatentAttention):
    """Latent attention whose projection has the rotary part of all heads after the other part of all heads."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, key, value = super().heads(x)
        nope, rope = parts(self.wq_b(self.q_norm(self.wq_a(x))), HEADS * NOPE, HEADS * ROPE)
        return torch.cat([heads_of(nope), self.rotary(heads_of(rope))], -1), key, value


UNKNOWN_LAYOUT = "no known layout shows how the outputs of its projections (wq_b, wkv_b) give its queries and keys"
UNSCALABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "queries normed after the up-projection": (lambda: two_latent_layers(QueriesNormedPerHead), UNKNOWN_LAYOUT),
    "own keys normed after it": (lambda: two_latent_layers(OwnKeysNormed), UNKNOWN_LAYOUT),
    "keys that are values": (lambda: two_latent_layers(KeysThatAreValues), "its keys are values as well"),
    "parts before heads": (lambda: two_latent_layers(PartsFirst), UNKNOWN_LAYOUT),
    "a rounded weight": (lambda: with_projections("wq_b", rounded), "RoundedLinear has a forward of its own"),
    "adapters": (lambda: with_projections("wkv_b", WithLora), "wkv_b is tests's WithLora, which has adapters"),
    "one module in two layers": (shared_up_projection, "another layer computes with its wkv_b as well"),
    "one weight in two layers": (shared_weight, "it shares W_Q or W_K with layer"),
    "frozen weights": (lambda: frozen(two_latent_layers()), "its weight is frozen"),
    "norms of queries and keys": (lambda: tiny("Qwen3", **DECODER), "its queries and keys are normalised"),
    "sinks": (lambda: tiny("GptOss", **DECODER, **EXPERTS, sliding_window=4), "passes s_aux, which is not probed"),
}


@pytest.mark.parametrize("attention", ["keep", "kernels"])
@pytest.mark.parametrize("kind", UNSCALABLE)
def test_unscalable_layer_is_unchanged_and_the_report_says_why(kind: str, attention: Any) -> None:
    make, reason = UNSCALABLE[kind]
    model = make()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with attach(model, **CLIPPING | {"attention": attention, "qk_clip_threshold": 1e-6}) as agent:
        for number in range(4):
            step(model, batch(number))
            agent.step()
        assert reason in unscaled_layers(agent)
        assert {*re.findall(r"(?:blocks|layers)\.(\d)", unscaled_layers(agent))} == {"0", "1"}
        assert agent.faults == {}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("make", "scaled"),
    [
        (LatentAttention, True),
        (QueriesNormedPerHead, False),
        (OwnKeysNormed, False),
    ],
)
def test_layout_is_recognised_despite_16_bit_rounding(make: type[LatentAttention], scaled: bool, dtype: Any) -> None:
    model = two_latent_layers(make).to(dtype)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with attach(model, **CLIPPING | {"numerics": "auto", "qk_clip_threshold": 1e-3}) as agent:
        agent.qk_clip_with(optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        for number in range(4):
            step(model, batch(number))
            agent.step()
        assert (unscaled_layers(agent) == "") == scaled
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert same != scaled


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel that scales on a GPU needs one")
@pytest.mark.parametrize("kind", ["DeepSeek's own code", "DeepSeek-V3"])
def test_gpu_scales_the_same_rows_by_the_same_factors(kind: str) -> None:
    weights = []
    for device in ("cpu", "cuda"):
        model = MODELS[kind]()[0].to(device)
        with attach(model, **CLIPPING | {"qk_clip_threshold": 0.5}) as agent:
            step(model, batch(0).to(device))
            agent.step()
            assert unscaled_layers(agent) == ""
        weights.append([parameter.detach().cpu() for parameter in model.parameters()])
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-6)


def test_norms_of_latent_attention_are_not_measured() -> None:
    with attach(two_latent_layers(), **CLIPPING | {"norms_every_steps": 1}) as agent:
        assert "norms are not measured: W_Q and W_K were not found" in agent._attached.report()
