"""QK-Clip scales multi-head latent attention as Kimi K2 did: by rows that a call showed, or not at all."""

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
    Adapted,
    LatentAttention,
    NormedOwnKeys,
    NormedQueries,
    SequenceFirst,
    heads_of,
    in_halves,
    inputs_of,
    neighbours_to_halves,
    parts,
    scores,
    two_latent_layers,
    unturned,
)
from tests.monitor.test_clipping import EVERY
from tests.monitor.tiny_models import batch
from tests.monitor.transformers_models import DECODER, EXPERTS, LATENT, tiny
from torch import Tensor, nn

from foreshock.monitor import AgentConfig, attach

CLIPS: dict[str, Any] = EVERY | {"qk_clip": "always", "numerics": "float32"}
OF_TRANSFORMERS = DECODER | LATENT | {"head_dim": LATENT["qk_rope_head_dim"]}
HAND_WRITTEN: dict[str, Callable[[], LatentAttention]] = {
    "DeepSeek's own code": LatentAttention,
    "rotary in halves": lambda: LatentAttention(in_halves),
    "neighbours put into halves": lambda: LatentAttention(neighbours_to_halves),
    "no positions": lambda: LatentAttention(unturned),
    "with biases": lambda: LatentAttention(bias=True),
    "sequence before batch": SequenceFirst,
}


@pytest.fixture(autouse=True)
def _every_step_may_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AgentConfig, "qk_clip_every_steps", 1)


def hand_written(kind: str) -> tuple[nn.Module, list[Any], Callable[..., Any]]:
    model = two_latent_layers(HAND_WRITTEN[kind])
    return model, list(model.blocks), lambda block, head: block.rows(head)


def of_transformers(kind: str, **sizes: Any) -> tuple[nn.Module, list[Any], Callable[..., Any]]:
    model: Any = tiny(kind, **OF_TRANSFORMERS | sizes)
    model.config.use_cache = False

    def rows(attention: Any, head: int) -> list[tuple[Any, list[int], str]]:
        nope, both = attention.qk_nope_head_dim, attention.qk_head_dim
        query, key = head * both, head * (nope + attention.v_head_dim)
        of_query = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
        return [
            (of_query, list(range(query, query + nope)), "query"),
            (of_query, list(range(query + nope, query + both)), "query alone"),
            (attention.kv_b_proj, list(range(key, key + nope)), "key"),
        ]

    return model, [layer.self_attn for layer in model.model.layers], rows


MODELS: dict[str, Callable[[], tuple[nn.Module, list[Any], Callable[..., Any]]]] = {
    **{kind: lambda kind=kind: hand_written(kind) for kind in HAND_WRITTEN},  # type: ignore[misc]
    "DeepSeek-V2": lambda: of_transformers("DeepseekV2"),
    "DeepSeek-V2-Lite, queries from no latent": lambda: of_transformers("DeepseekV2", q_lora_rank=None),
    "DeepSeek-V3": lambda: of_transformers("DeepseekV3"),
    "DeepSeek-V3, values of another width": lambda: of_transformers("DeepseekV3", v_head_dim=6, qk_nope_head_dim=12),
    "DeepSeek-V3, rotary in halves": lambda: of_transformers("DeepseekV3", rope_interleave=False),
    "DeepSeek-V3.2": lambda: of_transformers("DeepseekV32"),
    "MiniCPM3": lambda: of_transformers("MiniCPM3"),
    "GLM-4.7-Flash": lambda: of_transformers("Glm4MoeLite"),
    "Mistral 4": lambda: of_transformers("Mistral4"),
    "Youtu": lambda: of_transformers("Youtu"),
}


QUICK = (*HAND_WRITTEN, "DeepSeek-V2-Lite, queries from no latent", "DeepSeek-V3, values of another width")


def step(model: nn.Module, ids: Tensor | None = None) -> None:
    """A forward and a backward; no optimizer changes anything."""
    out: Any = model(batch(0) if ids is None else ids)
    logits = getattr(out, "logits", out)
    torch.autograd.backward(logits.square().mean())


def left_out(agent: Any) -> str:
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
def test_each_part_of_a_head_is_scaled_as_a_float64_loop_has_it_and_its_scores_by_gamma(
    kind: str, attention: Any
) -> None:
    model, blocks, rows = MODELS[kind]()
    with inputs_of(*blocks) as given:
        step(model)
    before = [scores(block, each) for block, each in zip(blocks, given, strict=True)]
    largest = torch.stack([each.amax((0, 2, 3)) for each in before])
    in_order = largest.flatten().sort().values
    tau = float(in_order[3:5].mean())  # some heads pass it, and some do not
    gamma = torch.where(largest > tau, tau / largest, 1.0)
    assert 0 < int((gamma < 1).sum()) < gamma.numel()
    expected = {id(p): p.detach().double() for p in model.parameters()}
    for block, of_heads in zip(blocks, gamma.tolist(), strict=True):
        for head, factor in enumerate(of_heads):
            powers = {"query": factor**0.5, "key": factor**0.5, "query alone": factor}
            for projection, own, role in rows(block, head):
                for parameter in projection.parameters():  # its weight, and its bias
                    for row in own:
                        expected[id(parameter)][row] = expected[id(parameter)][row] * powers[role]
    weights = {id(p): p.detach().clone() for p in model.parameters()}
    with attach(model, **CLIPS | {"attention": attention, "qk_clip_threshold": tau}) as agent:
        step(model)
        agent.step()
        assert left_out(agent) == ""
        assert agent.faults == {}
    for name, parameter in model.named_parameters():
        true = expected[id(parameter)]
        torch.testing.assert_close(parameter.detach().double(), true, rtol=1e-5, atol=0, msg=name)
        same = true == weights[id(parameter)].double()
        assert torch.equal(parameter[same], weights[id(parameter)][same]), name
    for block, each, old, factors in zip(blocks, given, before, gamma, strict=True):
        new = scores(block, each)  # of the same input
        wanted = old * factors[:, None, None]
        hidden = wanted == float("-inf")
        torch.testing.assert_close(
            new.masked_fill(hidden, 0), wanted.masked_fill(hidden, 0), rtol=1e-4, atol=1e-5 * float(largest.max())
        )


class Rounding(nn.Linear):
    """Its weight is rounded in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (4 * self.weight).round() / 4)


def with_projections(name: str, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    model: Any = two_latent_layers()
    for block in model.blocks:
        setattr(block, name, make(getattr(block, name)))
    return model  # type: ignore[no-any-return]


def one_up_projection() -> nn.Module:
    """Two layers that compute with one module."""
    model: Any = two_latent_layers()
    model.blocks[1].wkv_b = model.blocks[0].wkv_b
    return model  # type: ignore[no-any-return]


def one_weight() -> nn.Module:
    """Two layers whose modules hold one weight."""
    model: Any = two_latent_layers()
    model.blocks[1].wkv_b.weight = model.blocks[0].wkv_b.weight
    return model  # type: ignore[no-any-return]


def rounding(old: nn.Linear) -> nn.Module:
    new = Rounding(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    return new


def frozen(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    model.get_parameter("embedding.weight").requires_grad_()
    return model


class KeysThatAreValues(LatentAttention):
    """Its values are each head's own keys."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, _ = super().heads(x)
        return query, key, key[..., :VALUE]


class PartsFirst(LatentAttention):
    """What turns with the position lies behind the other part of all heads, and not of each."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, key, value = super().heads(x)
        nope, rope = parts(self.wq_b(self.q_norm(self.wq_a(x))), HEADS * NOPE, HEADS * ROPE)
        return torch.cat([heads_of(nope), self.rotary(heads_of(rope))], -1), key, value


NOTHING_FITS = "no known layout shows how the outputs of its projections (wq_b, wkv_b) give its queries and keys"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "queries normed behind the up-projection": (lambda: two_latent_layers(NormedQueries), NOTHING_FITS),
    "own keys normed behind it": (lambda: two_latent_layers(NormedOwnKeys), NOTHING_FITS),
    "keys that are values": (lambda: two_latent_layers(KeysThatAreValues), "its keys are values as well"),
    "parts before heads": (lambda: two_latent_layers(PartsFirst), NOTHING_FITS),
    "a rounded weight": (lambda: with_projections("wq_b", rounding), "Rounding has a forward of its own"),
    "adapters": (lambda: with_projections("wkv_b", Adapted), "wkv_b is tests's Adapted, which has adapters"),
    "one module in two layers": (one_up_projection, "another layer computes with its wkv_b as well"),
    "one weight in two layers": (one_weight, "it shares W_Q or W_K with layer"),
    "frozen weights": (lambda: frozen(two_latent_layers()), "its weight is frozen"),
    "norms of queries and keys": (lambda: tiny("Qwen3", **DECODER), "its queries and keys are normalised"),
    "sinks": (lambda: tiny("GptOss", **DECODER, **EXPERTS, sliding_window=4), "passes s_aux, which is not probed"),
}


@pytest.mark.parametrize("attention", ["keep", "kernels"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_scaled_rightly_is_left_as_it_is_and_named_with_the_reason(kind: str, attention: Any) -> None:
    make, why = REFUSED[kind]
    model = make()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with attach(model, **CLIPS | {"attention": attention, "qk_clip_threshold": 1e-6}) as agent:
        for number in range(4):
            step(model, batch(number))
            agent.step()
        assert why in left_out(agent)
        assert {*re.findall(r"(?:blocks|layers)\.(\d)", left_out(agent))} == {"0", "1"}
        assert agent.faults == {}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("make", "scaled"),
    [
        (LatentAttention, True),
        (NormedQueries, False),
        (NormedOwnKeys, False),
    ],
)
def test_rounding_neither_hides_the_rows_nor_a_norm(make: type[LatentAttention], scaled: bool, dtype: Any) -> None:
    model = two_latent_layers(make).to(dtype)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with attach(model, **CLIPS | {"numerics": "auto", "qk_clip_threshold": 1e-3}) as agent:
        agent.qk_clip_with(optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        for number in range(4):
            step(model, batch(number))
            agent.step()
        assert (left_out(agent) == "") == scaled
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert same != scaled


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel that scales on a GPU needs one")
@pytest.mark.parametrize("kind", ["DeepSeek's own code", "DeepSeek-V3"])
def test_on_a_gpu_the_same_rows_are_scaled_by_the_same_factors(kind: str) -> None:
    weights = []
    for device in ("cpu", "cuda"):
        model = MODELS[kind]()[0].to(device)
        with attach(model, **CLIPS | {"qk_clip_threshold": 0.5}) as agent:
            step(model, batch(0).to(device))
            agent.step()
            assert left_out(agent) == ""
        weights.append([parameter.detach().cpu() for parameter in model.parameters()])
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-6)


def test_its_norms_stay_unknown() -> None:
    with attach(two_latent_layers(), **CLIPS | {"norms_every_steps": 1}) as agent:
        assert "norms are not measured: W_Q and W_K were not found" in agent._attached.report()
