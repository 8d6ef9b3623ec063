"""Before the kernels compute a kind of call, they are compared with PyTorch's attention (on a CPU: the reference)."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.probing import counted_rows
from tests.monitor.tiny_models import CausalSelfAttention, GroupedQueryAttention, tiny_gpt, train_step
from tests.monitor.watched_training import listening
from torch import Tensor

from foreshock.contract import wire
from foreshock.contract.slots import Slot
from foreshock.kernels.flash_attention import flash_attention
from foreshock.monitor import Agent
from foreshock.monitor.attention import self_check
from foreshock.monitor.attention.self_check import Kind, difference, why_not_proven


@pytest.fixture(autouse=True)
def _clear_compared_kinds() -> Iterator[None]:
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
def test_kernels_agree_with_pytorchs_attention_for_all_kinds_of_calls(
    call: dict[str, Any], dtype: str, numerics: Any, device: str
) -> None:
    for head_dim, group in ((16, 1), (64, 2), (128, 2)):  # the last has special kernels on Hopper
        assert difference(Kind(device, dtype, numerics, head_dim, group, **call)) is None


def test_all_kernel_versions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[int, int]] = []

    def fake_versions(head_dim: int, group: int) -> Iterator[None]:
        for _ in range(group):
            turns.append((head_dim, group))
            yield

    def wrong(query: Tensor, *others: Tensor, **options: Any) -> Any:
        return flash_attention(query, *others, **options) * (1.1 if len(turns) == 2 else 1.0)

    monkeypatch.setattr(self_check, "each_version", fake_versions)
    assert difference(Kind("cpu", "float32", "float32", 16, 2)) is None
    turns.clear()
    monkeypatch.setattr(self_check, "flash_attention", wrong)
    assert "the output of foreshock's kernels is off" in str(difference(Kind("cpu", "float32", "float32", 16, 2)))
    assert turns == [(16, 2)] * 2


@pytest.mark.parametrize("call", CALLS[:1] + CALLS[5:6], ids=str)
def test_comparison_calls_the_kernels_with_counters_like_a_watched_layer(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    states_and_modes: list[tuple[Tensor, Tensor]] = []

    def record_call(*operands: Tensor, state: Tensor, modes: Tensor, **options: Any) -> Any:
        states_and_modes.append((state, modes))
        return flash_attention(*operands, state=state, modes=modes, **options)

    monkeypatch.setattr(self_check, "flash_attention", record_call)
    assert difference(Kind("cpu", "bfloat16", "kernel", 16, 2, **call)) is None
    ((state, modes),) = states_and_modes
    assert modes.tolist() == [0] * len(state)
    rows = self_check.LENGTH * (1 if call else 2)
    assert state[:, Slot.ROWS].tolist() == [rows] * len(state), "only the backward counts rows"


def wrong_scale(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """A kernel with half the scale."""
    return flash_attention(query, key, value, **options | {"scale": query.shape[3] ** -0.5 / 2})


def wrong_key_gradient(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """A kernel with a correct forward whose gradient of the keys is a tenth too small."""
    return flash_attention(query, key * 0.9 + (key * 0.1).detach(), value, **options)


def wrong_last_row(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """A kernel whose last row misses one key."""
    out = flash_attention(query, key, value, **options)
    last = F.scaled_dot_product_attention(query[:, :, -1:], key[:, :, :-1], value[:, :, :-1], enable_gqa=True)
    return torch.cat([out[:, :, :-1], last.to(out.dtype)], 2)


@pytest.mark.parametrize(("dtype", "numerics"), TYPES)
@pytest.mark.parametrize("wrong", [wrong_scale, wrong_key_gradient, wrong_last_row])
def test_wrong_kernel_output_or_gradient_is_detected(
    wrong: Any, dtype: str, numerics: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "flash_attention", wrong)
    problem = difference(Kind("cpu", dtype, numerics, 16, 1, "top_left"))
    assert problem is not None
    assert "of foreshock's kernels is off by" in problem


def test_comparison_leaves_random_state_saved_tensors_and_threads_unchanged() -> None:
    before, threads = torch.random.get_rng_state(), threading.active_count()
    packed: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved)
        return saved

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), hooks:
        assert why_not_proven("cpu", "float32", "float32", 16, 1, "top_left") is None
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not packed  # checkpointing counts saved tensors
    assert threading.active_count() == threads


def test_failed_comparison_is_reported_as_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*operands: Tensor, **options: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(self_check, "flash_attention", broken)
    problem = why_not_proven("cpu", "float32", "float32", 16, 1)
    assert problem == "the check of foreshock's kernels failed: RuntimeError: no such kernel"


EXECUTIONS: dict[str, Any] = {
    "eager": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "compiled, dynamic": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True),
}


@pytest.mark.full
@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_wrong_kernel_is_not_used_and_report_and_switch_give_the_reason(
    execution: str, switched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "flash_attention", wrong_key_gradient)
    model, plain = (tiny_gpt(CausalSelfAttention(16, 2), GroupedQueryAttention(16, 4, 2)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    settings = EVERY_STEP | {"attention": "keep" if switched else "kernels", "probe_rows": 5}
    with listening(model, **settings) as (agent, listener):
        if switched:
            assert agent.set_mode(agent.modes(), "row_corrected", "a test") is None
        losses = [_step(model, EXECUTIONS[execution](model), agent, step) for step in range(3)]
        report = agent.report()
    torch._dynamo.reset()
    expected = [_step(plain, EXECUTIONS[execution](plain), None, step) for step in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert {row for sample in counted_rows(listener) for row in sample} == {5}
    if switched:
        [answer] = listener.of(wire.Switched)
        assert answer.outcome == "refused"
        assert "the gradient of the keys of foreshock's kernels is off by" in answer.reason
        assert set(agent.modes().values()) == {"plain"}
    elif execution == "eager":
        assert "of foreshock's kernels is off by" in report
    assert "mitigation row_corrected will be refused in " in report


def _step(model: Any, running: Any, agent: Agent | None, step: int) -> Tensor:
    loss = train_step(running, torch.optim.SGD(model.parameters(), lr=0.1), step).detach()
    if agent is not None:
        agent.step(loss)
    return loss


def test_kernels_run_in_a_captured_step_only_after_an_earlier_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ("cpu", "float32", "float32", 16, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert why_not_proven(*kind) == self_check.UNCOMPARED
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert why_not_proven(*kind) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert why_not_proven(*kind) is None
