"""Measurements use the types that the attention used, whatever the training loop has switched on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.monitor import tiny_models
from tests.monitor.executions import EVERY_STEP
from tests.monitor.probing import (
    EVERY_ROW,
    probed,
    tensors,
)
from tests.monitor.tiny_models import CausalSelfAttention, GroupedQueryAttention, batch, tiny_gpt
from tests.monitor.watching import listening, train
from torch import Tensor, nn

from foreshock.contract import wire
from foreshock.contract.slots import SLOT_COUNT, Slot, slot_values
from foreshock.kernels.flash_attention import flash_attention
from foreshock.monitor import AgentConfig, attach
from foreshock.monitor.attention import watched_layer
from foreshock.monitor.attention.probe import Sampling
from foreshock.monitor.model.discovery import SDPA


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The numerics of every call that foreshock's operator serves."""
    names: list[str] = []

    def record(*tensors: Tensor, **options: Any) -> Any:
        names.append(options["numerics"])
        return flash_attention(*tensors, **options)

    monkeypatch.setattr(watched_layer, "flash_attention", record)
    return names


def attached(dtype: torch.dtype, *, autocast: bool = False, **settings: Any) -> list[Tensor]:
    """Loss and gradients of a model with an agent; its weights are always the same."""
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
def test_a_wide_model_trains_as_with_pytorchs_own_attention(
    dtype: torch.dtype, numerics: str, atol: float, served: list[str]
) -> None:
    expected = loss_and_gradients(tiny_gpt().to(dtype))
    got = attached(dtype)
    assert served == [numerics] * 2
    assert len(got) == len(expected) > 8
    for a, b in zip(got, expected, strict=True):
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
def test_operands_of_an_accelerator_that_no_kernel_serves_stay_with_pytorch_and_the_layer_says_why(
    dtype: torch.dtype, head_dim: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "meta" takes the place of the accelerator; it knows no autocast, so that is off."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)
    state = torch.empty(2, SLOT_COUNT, dtype=torch.int64, device="meta")
    layer = watched_layer.WatchedLayer("h.0", state, torch.empty(2, dtype=torch.int32, device="meta"), "auto")
    operand = torch.empty(1, 2, 4, head_dim, dtype=dtype, device="meta")
    assert problem in str(layer.problem(operand, operand, operand))
    attach(tiny_gpt(CausalSelfAttention(2 * head_dim, 2)), **EVERY_STEP).close()  # the reference serves any


@pytest.mark.promise("A21")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_queries_under_autocast_are_measured_in_the_type_that_the_attention_rounded_them_to(
    dtype: torch.dtype,
) -> None:
    query, key, value, grad = tensors(torch.float32, offset=0.3)
    query, key, value = query * 1.37, key * 0.91, value * 1.13  # of more digits than either type has
    with torch.autocast("cpu", dtype):
        out = SDPA(query, key, value, is_causal=True, enable_gqa=True)
    assert out.dtype == dtype
    sampling = Sampling(EVERY_ROW)
    settings: dict[str, Any] = {"causal": "top_left", "numerics": "kernel"}
    wide = probed(query, key, value, grad.to(dtype), out, sampling, **settings)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    cast = probed(query, key, value, grad.to(dtype), out, sampling, **settings)
    for slot in Slot:
        np.testing.assert_array_equal(slot_values(wide, slot), slot_values(cast, slot), err_msg=slot.name)
    assert slot_values(cast, Slot.DELTA_BIAS_ABS).min() > 0


@contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bf16 autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fp16 autocast": lambda: torch.autocast("cpu", torch.float16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "bf16 by default": lambda: default_dtype(torch.bfloat16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "another device by default": lambda: torch.device("meta"),
}


def samples(around: Callable[[], AbstractContextManager[Any]]) -> list[wire.Sample]:
    """Of three steps, of which the second one's boundary and the last words are `around` something."""
    torch.manual_seed(0)
    model = tiny_gpt(CausalSelfAttention(16, 4), GroupedQueryAttention(16, 4, 2))
    with ExitStack() as last:
        agent, listener = last.enter_context(listening(model, norms_every_steps=1, attention="keep"))
        for step in range(3):
            loss = model(batch(step)).square().mean()
            torch.autograd.backward(loss)
            with around() if step == 1 else nullcontext():
                agent.step(loss.detach(), grad_norm=1.0)
        with around():
            agent.state_dict()
            last.close()
    return listener.of(wire.Sample)


@pytest.mark.promise("A21")
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_sample_is_the_same_whatever_stands_round_the_boundary(name: str) -> None:
    plain, got = samples(nullcontext), samples(SURROUNDINGS[name])
    assert [sample.step for sample in got] == [1, 2, 3]
    for one, other in zip(got, plain, strict=True):
        assert one.loss == other.loss
        np.testing.assert_array_equal(one.words(), other.words())
        for norm in ("query_norm", "key_norm", "query_key_norm"):
            here, there = getattr(one, norm), getattr(other, norm)
            assert here is not None
            assert np.isfinite(here.numpy()).all()
            np.testing.assert_array_equal(here.numpy(), there.numpy())


@pytest.mark.promise("A21")
@pytest.mark.parametrize("attention", ["keep", "kernels"])
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_stands_round_attach_and_orders_changes_nothing_later(
    name: str, attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentConfig, "qk_clip_every_steps", 1)
    model = tiny_gpt(CausalSelfAttention(16, 4))
    with ExitStack() as later:
        with SURROUNDINGS[name]():
            told = listening(model, attention=attention, qk_clip_threshold=0.05)
            agent, listener = later.enter_context(told)
            agent.set_mode([(0, 1)], "row_corrected", reason="tried")
            agent.set_qk_clip(True, reason="tried")
        train(agent, model, 3)
    assert [event.outcome for event in listener.of(wire.Switched)] == ["applied"]
    assert any(event.heads for event in listener.of(wire.Clipped))
