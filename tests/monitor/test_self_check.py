"""Our kernels are compared with PyTorch's attention before they serve a kind of call; on a CPU the reference is."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.executions import EVERY_STEP
from tests.monitor.probing import counted_rows
from tests.monitor.tiny_models import CausalSelfAttention, GroupedQueryAttention, tiny_gpt, train_step
from tests.monitor.watching import listening
from torch import Tensor

from foreshock.contract import wire
from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention import flash_attention
from foreshock.monitor import Agent
from foreshock.monitor.attention import self_check
from foreshock.monitor.attention.self_check import Kind, difference, why_not_proven


@pytest.fixture(autouse=True)
def _nothing_is_proven_before_and_nothing_after() -> Iterator[None]:
    self_check._compared.clear()
    yield
    self_check._compared.clear()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
CALLS: list[dict[str, Any]] = [
    {},
    {"causal": "top_left"},
    {"causal": "bottom_right", "window": (40, -1)},
    {"window": (10, 20)},
    {"causal": "bottom_right", "softcap": 30.0},
    {"causal": "bottom_right", "packed": True},
    {"causal": "top_left", "scale": 1.0},
]
TYPES = [("bfloat16", "kernel"), ("float16", "kernel"), ("float32", "float32"), ("float64", "float64")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "numerics"), TYPES)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_our_kernels_compute_what_pytorchs_attention_does_in_calls_of_every_kind(
    call: dict[str, Any], dtype: str, numerics: Any, device: str
) -> None:
    for head_dim, group in ((16, 1), (64, 2), (128, 2)):  # the last has kernels of its own on Hopper
        assert difference(Kind(device, dtype, numerics, head_dim, group, **call)) is None


def test_each_version_of_the_kernels_that_may_serve_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[int, int]] = []

    def each(head_dim: int, group: int) -> Iterator[None]:
        for _ in range(group):
            turns.append((head_dim, group))
            yield

    def wrong(query: Tensor, *others: Tensor, **options: Any) -> Any:
        return flash_attention(query, *others, **options) * (1.1 if len(turns) == 2 else 1.0)

    monkeypatch.setattr(self_check, "each_version", each)
    assert difference(Kind("cpu", "float32", "float32", 16, 2)) is None
    turns.clear()
    monkeypatch.setattr(self_check, "flash_attention", wrong)
    assert "the output of foreshock's kernels is off" in str(difference(Kind("cpu", "float32", "float32", 16, 2)))
    assert turns == [(16, 2)] * 2


@pytest.mark.parametrize("call", CALLS[:1] + CALLS[5:6], ids=str)
def test_they_are_called_as_a_watched_layer_calls_them_which_may_launch_others_than_a_call_that_counts_nothing(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[Tensor, Tensor]] = []

    def called(*operands: Tensor, state: Tensor, modes: Tensor, **options: Any) -> Any:
        given.append((state, modes))
        return flash_attention(*operands, state=state, modes=modes, **options)

    monkeypatch.setattr(self_check, "flash_attention", called)
    assert difference(Kind("cpu", "bfloat16", "kernel", 16, 2, **call)) is None
    ((state, modes),) = given
    assert modes.tolist() == [0] * len(state)
    rows = self_check.LENGTH * (1 if call else 2)
    assert state[:, Slot.ROWS].tolist() == [rows] * len(state), "the backward counts"


def half_as_large(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """A kernel that forgets half of the scale."""
    return flash_attention(query, key, value, **options | {"scale": query.shape[3] ** -0.5 / 2})


def careless_gradient(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """A kernel that is right forwards, and gives the keys a tenth less than their gradient."""
    return flash_attention(query, key * 0.9 + (key * 0.1).detach(), value, **options)


def one_row_off(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """A kernel that lets the last row see one key less."""
    out = flash_attention(query, key, value, **options)
    last = F.scaled_dot_product_attention(query[:, :, -1:], key[:, :, :-1], value[:, :, :-1], enable_gqa=True)
    return torch.cat([out[:, :, :-1], last.to(out.dtype)], 2)


@pytest.mark.parametrize(("dtype", "numerics"), TYPES)
@pytest.mark.parametrize("wrong", [half_as_large, careless_gradient, one_row_off])
def test_a_kernel_that_differs_in_any_way_is_found(
    wrong: Any, dtype: str, numerics: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "flash_attention", wrong)
    told = difference(Kind("cpu", dtype, numerics, 16, 1, "top_left"))
    assert told is not None
    assert "of foreshock's kernels is off by" in told


def test_the_training_draws_the_same_random_numbers_and_is_in_no_other_way_touched() -> None:
    before, threads = torch.random.get_rng_state(), threading.active_count()
    packed: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved)
        return saved

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), hooks:
        assert why_not_proven("cpu", "float32", "float32", 16, 1, "top_left") is None
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not packed  # as checkpointing counts them
    assert threading.active_count() == threads


def test_a_comparison_that_fails_proves_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*operands: Tensor, **options: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(self_check, "flash_attention", broken)
    told = why_not_proven("cpu", "float32", "float32", 16, 1)
    assert told == "the check of foreshock's kernels failed: RuntimeError: no such kernel"


WAYS: dict[str, Any] = {
    "eager": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "compiled, dynamic": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True),
}


@pytest.mark.full
@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_that_differs_serves_no_call_and_the_reason_stands_in_the_report_and_in_the_answer(
    way: str, switched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "flash_attention", careless_gradient)
    model, plain = (tiny_gpt(CausalSelfAttention(16, 2), GroupedQueryAttention(16, 4, 2)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    settings = EVERY_STEP | {"attention": "keep" if switched else "kernels", "probe_rows": 5}
    with listening(model, **settings) as (agent, listener):
        if switched:
            assert agent.set_mode(agent.modes(), "row_corrected", "a test") is None
        losses = [_step(model, WAYS[way](model), agent, step) for step in range(3)]
        report = agent.report()
    torch._dynamo.reset()
    expected = [_step(plain, WAYS[way](plain), None, step) for step in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert {row for sample in counted_rows(listener) for row in sample} == {5}
    if switched:
        [answer] = listener.of(wire.Switched)
        assert answer.outcome == "refused"
        assert "the gradient of the keys of foreshock's kernels is off by" in answer.reason
        assert set(agent.modes().values()) == {"plain"}
    elif way == "eager":
        assert "of foreshock's kernels is off by" in report
    assert "mitigation row_corrected will be refused in " in report


def _step(model: Any, running: Any, agent: Agent | None, step: int) -> Tensor:
    loss = train_step(running, torch.optim.SGD(model.parameters(), lr=0.1), step).detach()
    if agent is not None:
        agent.step(loss)
    return loss


def test_a_captured_step_is_served_once_its_kind_was_compared_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("cpu", "float32", "float32", 16, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert why_not_proven(*asked) == self_check.UNCOMPARED
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert why_not_proven(*asked) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert why_not_proven(*asked) is None
