"""Which layer's forward is running: nested, interrupted, computed again, and in every thread by itself."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from foreshock.kernels.flash_attention import new_state
from foreshock.monitor.attention import watched_layer
from foreshock.monitor.attention.watched_layer import LAYER_ATTRIBUTE, WatchedLayer


def made(name: str) -> WatchedLayer:
    return WatchedLayer(name, new_state(1), torch.zeros(1, dtype=torch.int32), "auto")


CALLED = torch.ones(1, 2, 3, 4)
LAYERS = [made(f"h.{number}") for number in range(3)]


class Hooked:
    """A module's call as PyTorch makes it: a hook before the forward, the forward, a hook after it."""

    def __init__(self, layer: WatchedLayer, *, after_hook: bool = True) -> None:
        self.layer, self.after_hook = layer, after_hook

    def __call__(self, forward: object) -> None:
        self._hook()
        forward()  # type: ignore[operator]
        if self.after_hook:
            watched_layer.leave()

    def _hook(self) -> None:
        watched_layer.enter(self.layer)


@pytest.fixture(autouse=True)
def _nothing_runs() -> Iterator[None]:
    watched_layer.forget()
    watched_layer.expect_interception()
    yield
    watched_layer.forget()
    watched_layer.expect_interception()


@given(calls=st.recursive(st.just([]), lambda inner: st.lists(st.tuples(st.integers(0, 2), inner), max_size=3)))
def test_within_and_after_every_nested_forward_the_layer_is_the_one_whose_code_runs(
    calls: list[tuple[int, list[object]]],
) -> None:
    def run(inside: list[tuple[int, list[object]]], caller: WatchedLayer | None) -> None:
        assert watched_layer.layer_of_this_call() is caller
        for number, inner in inside:
            Hooked(LAYERS[number])(lambda inner=inner, number=number: run(inner, LAYERS[number]))
            assert watched_layer.layer_of_this_call() is caller

    run(calls, None)


def attention() -> None:
    """Stands for PyTorch's, as it is met outside every watched forward."""
    watched_layer.note_call_outside(CALLED, CALLED)


class Direct(nn.Module):
    """A module whose code is called past its hooks."""

    def forward(self) -> None:
        attention()


def test_a_call_outside_is_counted_and_the_module_whose_code_it_is_is_named() -> None:
    attention()
    attention()
    assert watched_layer.outside.calls == 2
    module, layer = Direct(), made("h.9")
    setattr(module, LAYER_ATTRIBUTE, layer)
    module.forward()
    assert watched_layer.outside.calls == 3
    [reason] = layer.unserved
    assert "call the module itself" in reason
    watched_layer.forget()
    assert watched_layer.outside.calls == 0


def test_a_call_outside_keeps_nothing_alive_that_those_who_called_it_let_go_of() -> None:
    loss = torch.ones(2, requires_grad=True).sum()
    kept = weakref.ref(loss)
    attention()
    del loss
    assert kept() is None


def test_a_recompute_that_lost_its_layer_is_warned_about_where_our_kernels_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept, served = made("h.0"), made("h.1")
    kept.keeps = True

    class Recomputes(torch.autograd.Function):
        @staticmethod
        def forward(_: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: object, *grads: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                watched_layer.note_call_outside(CALLED, CALLED)
            return grads[0]

    def backward() -> None:
        out = Recomputes.apply(torch.ones(2, requires_grad=True))  # type: ignore[no-untyped-call]
        out.sum().backward()

    watched_layer.outside.layers.add(kept)
    try:
        backward()  # kept as it is: nothing is lost but the count
        assert watched_layer.outside.calls == 1
        assert not caplog.records
        watched_layer.outside.calls = 0
        watched_layer.outside.layers.add(served)
        backward()
        (warned,) = caplog.messages
        assert "attention is recomputed in a backward" in warned
        assert "Use torch.utils.checkpoint" in warned
    finally:
        watched_layer.outside.layers.discard(kept)
        watched_layer.outside.layers.discard(served)
