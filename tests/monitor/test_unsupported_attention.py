"""Unsupported or uncounted attention is reported once, with the reason and advice."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.tiny_models import (
    CausalSelfAttention,
    batch,
    tiny_gpt,
    train_step,
)
from tests.monitor.unusual_attention import ManualAttention
from tests.monitor.watched_training import listening, train
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.monitor import attach
from foreshock.monitor.attention import finder as module_of_lookouts

WIDTH, HEADS = 16, 2
SETTINGS = EVERY_STEP | {"attention": "keep"}
ATTENTION_SETTINGS = ["keep", "kernels"]


class Direct(nn.Module):
    """Calls its attention's forward directly, which skips PyTorch's hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = CausalSelfAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention.forward(x)


class Operators(CausalSelfAttention):
    """Calls PyTorch's operator instead of its function; another branch calls the function."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return F.scaled_dot_product_attention(x, x, x)
        query, key, value = self.c_attn(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out: Tensor = torch.ops.aten.scaled_dot_product_attention(query, key, value)
        return out.transpose(1, 2).flatten(2)


class ManualHead(nn.Module):
    """A single head by matrix products, without an attribute for the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH // HEADS) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        return scores.softmax(-1) @ self.value(x)  # type: ignore[no-any-return]


class ConcatenatedHeads(nn.Module):
    """Concatenates the outputs of its heads."""

    def __init__(self, *heads: nn.Module) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


def log_and_report(model: nn.Module, caplog: pytest.LogCaptureFixture, steps: int = 2, **options: Any) -> str:
    """The log and the report after some steps."""
    with caplog.at_level(logging.WARNING, "foreshock"), attach(model, **SETTINGS | options) as agent:
        for _ in range(steps):
            torch.autograd.backward(model(torch.randn(2, 5, WIDTH)).square().sum())
            agent.step(1.0)
        return f"{caplog.text}\n{agent.report()}"


class UnreachableAndUnused(nn.Module):
    """One attention is unreachable, the other is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.by_operator, self.never = Operators(WIDTH, HEADS), CausalSelfAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.by_operator(x)  # type: ignore[no-any-return]


class NeedsWeights(nn.Module):
    """nn.MultiheadAttention with need_weights=True, its default."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]  # type: ignore[no-any-return]


def half_frozen() -> nn.Module:
    model = nn.Sequential(CausalSelfAttention(WIDTH, HEADS), CausalSelfAttention(WIDTH, HEADS))
    model[0].requires_grad_(False)
    return model


REASONS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "forward called directly": (
        Direct,
        [
            "past the hooks of PyTorch, as by .forward(x); call the module itself (attention)",
            "watched 0 of 1 attention layers",
        ],
    ),
    "nothing trained": (
        half_frozen,
        [
            "nothing that it depends on is trained, so no backward runs through it (0)",
            "layer 0 (0) counted nothing in step 1: nothing that it depends on is trained",
            "watched 1 of 2 attention layers",
        ],
    ),
    "unreachable and unused": (
        UnreachableAndUnused,
        [
            "attention of by_operator is not watched: it calls PyTorch's attention where it cannot be met",
            "(never) counted nothing in step 1: its forward or backward did not run through the watched",
        ],
    ),
    "need_weights": (
        NeedsWeights,
        [
            "(attention) counted nothing in step 1: it computes its probabilities itself under need_weights=True",
            "its default; give need_weights=False",
        ],
    ),
}


@pytest.mark.parametrize("attention", ATTENTION_SETTINGS)
@pytest.mark.parametrize("reason", REASONS)
def test_uncounted_attention_is_reported_with_advice(
    reason: str, attention: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, sentences = REASONS[reason]
    output = log_and_report(make(), caplog, attention=attention)
    assert all(sentence in output for sentence in sentences), output


def test_layers_with_the_same_problem_are_reported_in_one_message(caplog: pytest.LogCaptureFixture) -> None:
    manual = [ConcatenatedHeads(*(ManualHead() for _ in range(HEADS))) for _ in range(3)]
    output = log_and_report(nn.Sequential(*manual, CausalSelfAttention(WIDTH, HEADS)), caplog)
    assert output.count("is not watched: it computes its attention by hand") == 1
    assert all(f"{layer}.heads.{head}" in output for layer in range(3) for head in range(HEADS))


def test_double_backward_is_reported_as_uncounted_with_the_kernels(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(CausalSelfAttention(WIDTH, HEADS))
    with caplog.at_level(logging.WARNING, "foreshock"), attach(model, **EVERY_STEP) as agent:
        for step in range(3):
            x = torch.randn(2, 5, WIDTH, requires_grad=True)
            loss = model(x).square().mean()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            if step:  # the backward of the loss counts, the gradient of the penalty does not
                torch.autograd.backward(loss + gradient.square().sum())
            agent.step(float(loss.detach()))
        assert agent.report().endswith("watched 1 of 1 attention layers")
    (line,) = [record.message for record in caplog.records if "counted nothing" in record.message]
    why = "no backward ran through it, or only backwards that are differentiated again, which are not counted"
    assert line == f"foreshock: layer 0 (0) counted nothing in step 1: {why}"


def test_unexpected_number_of_heads_is_reported_with_advice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Differential(CausalSelfAttention):
        """Differential attention: two half heads per head."""

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.c_attn(x).unflatten(2, (3, 2 * HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    model = Differential(WIDTH, HEADS)
    output = log_and_report(model, caplog)
    assert "model is not watched in this call: its query has 4 heads, 2 were announced; attach(heads=...)" in output
    assert "watched 1 of 1 attention layers" in log_and_report(model, caplog, heads={"": 4})


def test_attention_calls_outside_watched_modules_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, x = tiny_gpt(), torch.randn(1, 2, 4, 8, requires_grad=True)
    with attach(model, **EVERY_STEP) as agent, caplog.at_level(logging.WARNING, "foreshock"):
        F.scaled_dot_product_attention(x, x, x)
        train(agent, model, 1)
    assert any("outside every watched module" in r.message for r in caplog.records)


def test_outside_calls_without_gradients_or_before_attach_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    other, model = tiny_gpt(), tiny_gpt(seed=1)
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    with attach(other, **EVERY_STEP):
        F.scaled_dot_product_attention(x, x, x)
        with caplog.at_level(logging.WARNING, "foreshock"), attach(model, **EVERY_STEP) as agent:
            copied = copy.deepcopy(model)
            with torch.no_grad():
                copied(batch(0))
            with torch.inference_mode():
                copied(batch(0))
            copied.requires_grad_(False)(batch(0))  # like a frozen teacher
            train(agent, model, 1)
    assert "outside every watched module" not in caplog.text


PYTORCH_BACKWARD = torch.autograd.backward


def trained(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    return [train_step(model, optimizer, step).item() for step in range(steps)]


def model_with_manual_attention() -> Any:
    torch.manual_seed(0)
    return tiny_gpt(CausalSelfAttention(16, 2), ManualAttention())


def test_torch_backward_is_restored_after_two_steps_and_after_detach() -> None:
    model = model_with_manual_attention()
    with attach(model, **EVERY_STEP):
        assert torch.autograd.backward is not PYTORCH_BACKWARD
        trained(model, 2)
        assert torch.autograd.backward is PYTORCH_BACKWARD
        model.blocks.append(ManualAttention())
    attach(model, **EVERY_STEP).close()
    assert torch.autograd.backward is PYTORCH_BACKWARD


def test_unreadable_graph_stops_the_search_for_attention_but_not_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(module_of_lookouts, "attention_in", fails)
    model = model_with_manual_attention()
    with attach(model, **EVERY_STEP):
        trained(model)
        assert torch.autograd.backward is PYTORCH_BACKWARD


@pytest.mark.promise("A24")
def test_unfreezing_attention_mid_run_prints_a_new_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_gpt()
    model.embedding.requires_grad_(False)
    model.blocks.requires_grad_(False)
    with attach(model, **{**EVERY_STEP, "quiet": False}) as agent:
        for step in range(4):
            if step == 2:
                model.blocks.requires_grad_(True)
            train(agent, model, [step])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("watched ")]
    assert lines == ["watched 0 of 2 attention layers", "watched 2 of 2 attention layers"]


@pytest.mark.promise("A24")
@pytest.mark.parametrize("replaced", [False, True])
def test_attention_added_or_replaced_after_attach_is_reported_as_unwatched(
    replaced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_gpt()
    with attach(model, **EVERY_STEP) as agent:
        for step in range(8):
            if step == 3 and replaced:
                model.blocks[1] = CausalSelfAttention(16, 2)
            elif step == 3:
                model.blocks.append(CausalSelfAttention(16, 2))
            train(agent, model, [step])
    name = "blocks.1" if replaced else "blocks.2"
    messages = [r.getMessage() for r in caplog.records if "is not watched" in r.getMessage()]
    assert messages == [
        f"foreshock: the attention of {name} is not watched: it was added after attach; close the agent and attach "
        "again to watch it"
    ]
    assert f"watched {1 if replaced else 2} of {2 if replaced else 3} attention layers" in agent.report().splitlines()


@pytest.mark.promise("A24")
@pytest.mark.parametrize("back", [False, True])
def test_layer_replaced_twice_counts_once_and_is_watched_again_if_its_module_returns(
    back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_gpt()
    own = model.blocks[1]
    with attach(model, **EVERY_STEP) as agent:
        for step in range(8):
            if step in (2, 5):
                model.blocks[1] = own if back and step == 5 else CausalSelfAttention(16, 2)
            train(agent, model, [step])
    messages = [r.getMessage() for r in caplog.records if "is not watched" in r.getMessage()]
    assert len(messages) == (1 if back else 2)
    lines = agent.report().splitlines()
    assert f"watched {2 if back else 1} of 2 attention layers" in lines
    assert any(line.startswith("1 x not monitored: it was added after attach") for line in lines) is not back


@pytest.mark.promise("A23")
def test_norms_of_a_layer_are_unknown_while_its_module_is_replaced() -> None:
    model = tiny_gpt()
    own = model.blocks[1]
    with listening(model, norms_every_steps=1) as (agent, listener):
        for step, module in enumerate([own, CausalSelfAttention(16, 2), torch.nn.Identity(), own, own]):
            if module is not model.blocks[1]:
                model.blocks[1] = module
            train(agent, model, [step])
            if module is not own:
                assert "norms are not measured: its module was taken out of the model" in agent.report()
    norms = [sample.query_norm.numpy() for sample in listener.of(wire.Sample)]
    known = [np.isfinite(each).reshape(2, 2).all(axis=1).tolist() for each in norms]
    assert known == [[True, True], [True, False], [True, False], [True, True], [True, True]]
