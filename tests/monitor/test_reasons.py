"""A layer that counts nothing says why, in words that tell what to do."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.tiny_models import CausalSelfAttention
from torch import Tensor, nn

from foreshock.monitor import assess, attach
from foreshock.monitor.model.discovery import find_attention

WIDTH, HEADS = 16, 2
QUIET: dict[str, Any] = {"url": None, "quiet": True, "strict": True, "sample_every_seconds": 0.0}
WAYS = ["keep", "kernels"]


class Direct(nn.Module):
    """Calls its attention past PyTorch's hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = CausalSelfAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention.forward(x)


class Operators(CausalSelfAttention):
    """Calls PyTorch's operator and not its function, which its code names on another way."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return F.scaled_dot_product_attention(x, x, x)
        query, key, value = self.c_attn(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out: Tensor = torch.ops.aten.scaled_dot_product_attention(query, key, value)
        return out.transpose(1, 2).flatten(2)


class OneHead(nn.Module):
    """A module for each head, as lectures write it; nothing tells that it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH // HEADS) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)


class ByHand(OneHead):
    """The same without PyTorch's function."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        return scores.softmax(-1) @ self.value(x)  # type: ignore[no-any-return]


class Heads(nn.Module):
    """What its heads give, side by side."""

    def __init__(self, *heads: nn.Module) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


def told_of(model: nn.Module, caplog: pytest.LogCaptureFixture, steps: int = 2, **options: Any) -> str:
    """What the log and the report say of some steps."""
    with caplog.at_level(logging.WARNING, "foreshock"), attach(model, **QUIET, **options) as agent:
        for _ in range(steps):
            torch.autograd.backward(model(torch.randn(2, 5, WIDTH)).square().sum())
            agent.step(1.0)
        return f"{caplog.text}\n{agent.report()}"


@pytest.mark.parametrize("way", WAYS)
def test_an_attention_that_is_called_past_the_hooks_is_told_to_be_called_by_its_module(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = told_of(Direct(), caplog, attention=way)
    assert "past the hooks of PyTorch, as by .forward(x); call the module itself (attention)" in told
    assert "watched 0 of 1 attention layers" in told


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_under_which_nothing_is_trained_says_so(way: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(CausalSelfAttention(WIDTH, HEADS), CausalSelfAttention(WIDTH, HEADS))
    model[0].requires_grad_(False)
    told = told_of(model, caplog, attention=way)
    assert "nothing that it depends on is trained, so no backward runs through it (0)" in told
    assert "layer 0 (0) counted nothing in step 1: nothing that it depends on is trained" in told
    assert "watched 1 of 2 attention layers" in told


def test_a_forward_that_calls_no_function_that_is_met_is_told_from_one_that_did_not_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by_operator, self.never = Operators(WIDTH, HEADS), CausalSelfAttention(WIDTH, HEADS)

        def forward(self, x: Tensor) -> Tensor:
            return self.by_operator(x)  # type: ignore[no-any-return]

    told = told_of(Idle(), caplog)
    assert "attention of by_operator is not watched: it calls PyTorch's attention where it cannot be met" in told
    assert "(never) counted nothing in step 1: its forward or backward did not run through the watched" in told


def test_a_multihead_attention_that_is_asked_for_its_weights_is_told_how_to_be_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class ByDefault(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]  # type: ignore[no-any-return]

    told = told_of(ByDefault(), caplog)
    assert "(attention) counted nothing in step 1: it computes its probabilities itself under need_weights=True" in told
    assert "its default; give need_weights=False" in told


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is:DeprecationWarning")
def test_attention_in_a_function_that_torchscript_compiled_does_not_go_unseen(caplog: pytest.LogCaptureFixture) -> None:
    class Scripted(CausalSelfAttention):
        def __init__(self, scripted: Any) -> None:
            super().__init__(WIDTH, HEADS)
            self.scripted = scripted

        def core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.scripted(query, key, value)  # type: ignore[no-any-return]

    told = told_of(nn.Sequential(Scripted(torch.jit.script(attend)), CausalSelfAttention(WIDTH, HEADS)), caplog)
    assert "attention of 0 is not watched: it calls PyTorch's attention where it cannot be met" in told
    assert "watched 1 of 2 attention layers" in told


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is:DeprecationWarning")
def test_a_module_that_torchscript_compiled_stands_in_no_ones_way(caplog: pytest.LogCaptureFixture) -> None:
    parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH)
    model = nn.Sequential(*map(torch.jit.script, parts), CausalSelfAttention(WIDTH, HEADS))
    told = told_of(model, caplog)
    assert "the attention of 1.self_attn is not watched: it computes its attention by hand" in told
    assert "watched 1 of 2 attention layers" in told
    assert assess(model).watched == 1


def test_heads_of_which_only_calls_tell_are_watched_each_as_a_layer(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Heads(OneHead(), OneHead()))
    assert "watched 2 of 2 attention layers" in told_of(model, caplog, steps=3)
    told = told_of(model, caplog, heads={"0.heads.0": 1, "0.heads.1": 1})
    assert "watched 2 of 2 attention layers" in told


def test_many_layers_of_one_problem_are_told_in_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    by_hand = [Heads(*(ByHand() for _ in range(HEADS))) for _ in range(3)]
    told = told_of(nn.Sequential(*by_hand, CausalSelfAttention(WIDTH, HEADS)), caplog)
    assert told.count("is not watched: it computes its attention by hand") == 1
    assert all(f"{layer}.heads.{head}" in told for layer in range(3) for head in range(HEADS))


def test_layers_that_count_nothing_for_one_reason_are_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    layers = nn.Sequential(*(CausalSelfAttention(WIDTH, HEADS) for _ in range(3)))
    with caplog.at_level(logging.WARNING, "foreshock"), attach(layers, **QUIET) as agent:
        with torch.no_grad():
            layers(torch.randn(2, 5, WIDTH))
        agent.step(1.0)
    (line,) = [record.message for record in caplog.records if "counted nothing" in record.message]
    assert "layer 0 (0), layer 1 (1), layer 2 (2) counted nothing in step 1: no backward ran through it" in line


def test_gradients_that_are_differentiated_again_are_named_where_our_kernels_do_not_count_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(CausalSelfAttention(WIDTH, HEADS))
    every_step = {**QUIET, "attention": "kernels", "sample_every_steps": 1}
    with caplog.at_level(logging.WARNING, "foreshock"), attach(model, **every_step) as agent:
        for step in range(3):
            x = torch.randn(2, 5, WIDTH, requires_grad=True)
            loss = model(x).square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            if step:  # the loss's own backward counts, the gradient of the penalty does not
                torch.autograd.backward(loss + slope.square().sum())
            agent.step(float(loss.detach()))
        assert agent.report().endswith("watched 1 of 1 attention layers")
    (line,) = [record.message for record in caplog.records if "counted nothing" in record.message]
    why = "no backward ran through it, or only backwards that are differentiated again, which are not counted"
    assert line == f"foreshock: layer 0 (0) counted nothing in step 1: {why}"


def test_a_head_dim_that_only_the_width_of_a_key_tells_is_known() -> None:
    class OfOneKey(nn.Module):
        """As timm's attention of several queries and one key: its projections are convolutions in containers."""

        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.key_dim = HEADS, 8
            self.query = nn.Sequential(nn.Conv2d(WIDTH, HEADS * 8, 1))

        def forward(self, x: Tensor) -> Tensor:
            query = self.query(x).flatten(2).mT.unflatten(2, (HEADS, 8)).transpose(1, 2)
            return F.scaled_dot_product_attention(query, query[:, :1], query[:, :1])

    (found,) = find_attention(OfOneKey(), {})
    assert (found.problem, found.heads, found.head_dim) == (None, HEADS, 8)


def test_more_heads_than_were_announced_are_told_with_the_way_to_announce_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Differential(CausalSelfAttention):
        """Two half heads for each head."""

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.c_attn(x).unflatten(2, (3, 2 * HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    model = Differential(WIDTH, HEADS)
    told = told_of(model, caplog)
    assert "model is not watched in this call: its query has 4 heads, 2 were announced; attach(heads=...)" in told
    assert "watched 1 of 1 attention layers" in told_of(model, caplog, heads={"": 4})


def test_calls_under_torch_func_are_told_as_such_and_not_as_calls_outside(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(CausalSelfAttention(WIDTH, HEADS))
    weights: dict[str, Tensor] = dict(model.named_parameters())
    x = torch.randn(2, 5, WIDTH)

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().sum()  # type: ignore[no-any-return]

    with caplog.at_level(logging.WARNING, "foreshock"), attach(model, **QUIET) as agent:
        for _ in range(2):
            torch.func.grad(loss)(weights)
            agent.step(1.0)
        report = agent.report()
    why = "torch.func, forward mode or a tracer runs it, and sees the model without foreshock"
    assert f"layer 0 (0) counted nothing in step 1: {why}" in caplog.text
    assert f"native attention, not measured: {why} (0)" in report
    assert "outside every watched module" not in caplog.text
