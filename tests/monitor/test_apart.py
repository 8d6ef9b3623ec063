"""What the agent computes at a step boundary does not depend on what the training loop has switched on round it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.doubles import Listener
from tests.monitor.tiny_models import CausalSelfAttention, GroupedQueryAttention, batch, tiny_gpt

from foreshock.contract import wire
from foreshock.monitor import attach
from foreshock.monitor.guard import apart

CPU = torch.device("cpu")


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
    model, listener = tiny_gpt(CausalSelfAttention(16, 4), GroupedQueryAttention(16, 4, 2)), Listener()
    agent = attach(model, run="apart", norms_every_steps=1, sample_every_seconds=0.0, sample_every_steps=1, quiet=True)
    agent.subscribe(listener)
    for step in range(3):
        loss = model(batch(step)).square().mean()
        loss.backward()
        with around() if step == 1 else nullcontext():
            agent.step(loss.detach(), grad_norm=1.0)
    with around():
        agent.state_dict()
        agent.close()
    assert agent.faults == {}
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
def test_what_stands_round_attach_and_orders_changes_nothing_later(name: str, attention: Any) -> None:
    model, listener = tiny_gpt(CausalSelfAttention(16, 4)), Listener()
    settings: dict[str, Any] = {"attention": attention, "sample_every_seconds": 0.0, "quiet": True, "strict": True}
    with SURROUNDINGS[name]():
        agent = attach(model, run="apart", qk_clip_threshold=0.05, qk_clip_every_steps=1, **settings)
        agent.subscribe(listener)
        agent.set_mode([(0, 1)], "row_corrected", reason="tried")
        agent.set_qk_clip(True, reason="tried")
    for step in range(3):
        loss = model(batch(step)).square().mean()
        loss.backward()
        agent.step(loss.detach(), grad_norm=1.0)
    agent.close()
    assert agent.faults == {}
    assert [event.outcome for event in listener.of(wire.Switched)] == ["applied"]
    assert any(event.heads for event in listener.of(wire.Clipped))


@pytest.mark.promise("A21")
def test_a_loop_that_stands_under_one_autocast_has_its_norms_taken() -> None:
    layer, listener = CausalSelfAttention(16, 4), Listener()
    model = tiny_gpt(layer)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        agent = attach(model, run="apart", norms_every_steps=1, sample_every_seconds=0.0, quiet=True)
        agent.subscribe(listener)
        for step in range(5):
            loss = model(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            agent.step(loss)
        agent.close()
    assert agent.faults == {}
    weight = layer.c_attn.weight.detach().double()[:16].view(4, 4, 16)
    norms = listener.of(wire.Sample)[-1].query_norm
    np.testing.assert_allclose(norms.numpy(), torch.linalg.matrix_norm(weight, 2), rtol=0.03)


def test_what_stood_round_the_agent_stands_again_after_it() -> None:
    with torch.autocast("cpu", torch.float16), torch.inference_mode():
        with apart(CPU):
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.is_inference_mode_enabled()
