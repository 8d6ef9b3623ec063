"""Measurements use the attention's own types, independent of contexts that the training loop has entered."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor import tiny_models
from tests.monitor.execution_modes import EVERY_STEP
from tests.monitor.probing import (
    EVERY_ROW,
    probed,
    tensors,
)
from tests.monitor.tiny_models import CausalSelfAttention, GroupedQueryAttention, batch, tiny_gpt
from tests.monitor.watched_training import listening, train
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import SLOT_COUNT, Slot, slot_values
from foreshock.kernels.flash_attention import flash_attention
from foreshock.monitor import AgentConfig, attach
from foreshock.monitor.attention import watched_layer
from foreshock.monitor.attention.probe import Sampling
from foreshock.monitor.model.discovery import SDPA


@pytest.fixture
def numerics_used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The `numerics` argument of each call of foreshock's operator."""
    names: list[str] = []

    def record(*tensors: Tensor, **options: Any) -> Any:
        names.append(options["numerics"])
        return flash_attention(*tensors, **options)

    monkeypatch.setattr(watched_layer, "flash_attention", record)
    return names


def loss_and_gradients_watched(dtype: torch.dtype, *, autocast: bool = False, **settings: Any) -> list[Tensor]:
    """Loss and gradients of a model with fixed weights and an agent."""
    model = tiny_gpt().to(dtype)
    with attach(model, **EVERY_STEP, **settings):
        return loss_and_gradients(model, autocast=autocast)


def loss_and_gradients(model: nn.Module, *, autocast: bool = False) -> list[Tensor]:
    ids = tiny_models.batch(0, rows=4)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.autograd.backward(loss)
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.promise("A14")
@pytest.mark.parametrize(
    ("dtype", "numerics", "atol"), [(torch.float32, "float32", 1e-6), (torch.float64, "float64", 1e-14)]
)
def test_float32_and_float64_models_train_like_pytorchs_attention(
    dtype: torch.dtype, numerics: str, atol: float, numerics_used: list[str]
) -> None:
    expected = loss_and_gradients(tiny_gpt().to(dtype))
    found = loss_and_gradients_watched(dtype)
    assert numerics_used == [numerics] * 2
    assert len(found) == len(expected) > 8
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, atol=atol, rtol=10 * atol)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "problem"),
    [
        (torch.bfloat16, 8, "None"),
        (torch.float16, 8, "None"),
        (torch.float32, 8, "ask for numerics='float32'"),
        (torch.bfloat16, 12, "its head dim is 12; the kernels support multiples of 8 up to 256"),
        (torch.bfloat16, 264, "its head dim is 264; the kernels support multiples of 8 up to 256"),
    ],
)
def test_unsupported_operands_stay_with_pytorch_and_the_layer_says_why(
    dtype: torch.dtype, head_dim: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The "meta" device replaces an accelerator. It does not support autocast, so the query for it is patched."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)
    state = torch.empty(2, SLOT_COUNT, dtype=torch.int64, device="meta")
    layer = watched_layer.WatchedLayer("h.0", state, torch.empty(2, dtype=torch.int32, device="meta"), "auto")
    operand = torch.empty(1, 2, 4, head_dim, dtype=dtype, device="meta")
    assert problem in str(layer.problem(operand, operand, operand))
    attach(tiny_gpt(CausalSelfAttention(2 * head_dim, 2)), **EVERY_STEP).close()  # the reference supports all shapes


@pytest.mark.promise("A21")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_queries_under_autocast_are_measured_in_the_autocast_type(
    dtype: torch.dtype,
) -> None:
    query, key, value, grad = tensors(torch.float32, offset=0.3)
    query, key, value = query * 1.37, key * 0.91, value * 1.13  # more digits than either type can represent
    with torch.autocast("cpu", dtype):
        out = SDPA(query, key, value, is_causal=True, enable_gqa=True)
    assert out.dtype == dtype
    sampling = Sampling(EVERY_ROW)
    settings: dict[str, Any] = {"causal": "top_left", "numerics": "kernel"}
    float32_words = probed(query, key, value, grad.to(dtype), out, sampling, **settings)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    rounded_words = probed(query, key, value, grad.to(dtype), out, sampling, **settings)
    for slot in Slot:
        np.testing.assert_array_equal(
            slot_values(float32_words, slot), slot_values(rounded_words, slot), err_msg=slot.name
        )
    assert slot_values(rounded_words, Slot.DELTA_BIAS_ABS).min() > 0


@contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bf16 autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fp16 autocast": lambda: torch.autocast("cpu", torch.float16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default dtype bf16": lambda: default_dtype(torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: torch.device("meta"),
}


def samples_within(context: Callable[[], AbstractContextManager[Any]]) -> list[wire.Sample]:
    """Samples of three steps, with the second agent.step, state_dict and close inside the context."""
    torch.manual_seed(0)
    model = tiny_gpt(CausalSelfAttention(16, 4), GroupedQueryAttention(16, 4, 2))
    with ExitStack() as last:
        agent, listener = last.enter_context(listening(model, norms_every_steps=1, attention="keep"))
        for step in range(3):
            loss = model(batch(step)).square().mean()
            torch.autograd.backward(loss)
            with context() if step == 1 else nullcontext():
                agent.step(loss.detach(), grad_norm=1.0)
        with context():
            agent.state_dict()
            last.close()
    return listener.of(wire.Sample)


@pytest.mark.promise("A21")
@pytest.mark.parametrize("name", CONTEXTS)
def test_samples_do_not_depend_on_contexts_around_agent_step(name: str) -> None:
    plain, found = samples_within(nullcontext), samples_within(CONTEXTS[name])
    assert [sample.step for sample in found] == [1, 2, 3]
    for one, other in zip(found, plain, strict=True):
        assert one.loss == other.loss
        np.testing.assert_array_equal(one.words(), other.words())
        for norm in ("query_norm", "key_norm", "query_key_norm"):
            norms_found, norms_expected = getattr(one, norm), getattr(other, norm)
            assert norms_found is not None
            assert np.isfinite(norms_found.numpy()).all()
            np.testing.assert_array_equal(norms_found.numpy(), norms_expected.numpy())


@pytest.mark.promise("A21")
@pytest.mark.parametrize("attention", ["keep", "kernels"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_around_attach_and_switches_have_no_later_effect(
    name: str, attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentConfig, "qk_clip_every_steps", 1)
    model = tiny_gpt(CausalSelfAttention(16, 4))
    with ExitStack() as later:
        with CONTEXTS[name]():
            listening_agent = listening(model, attention=attention, qk_clip_threshold=0.05)
            agent, listener = later.enter_context(listening_agent)
            agent.set_mode([(0, 1)], "row_corrected", reason="tried")
            agent.set_qk_clip(True, reason="tried")
        train(agent, model, 3)
    assert [event.outcome for event in listener.of(wire.Switched)] == ["applied"]
    assert any(event.heads for event in listener.of(wire.Clipped))
