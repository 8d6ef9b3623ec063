"""Which layer's forward is running: nested, interrupted, computed again, and in every thread by itself."""

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from foreshock.kernels.flash_attention import new_state
from foreshock.monitor.attention import running
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
            running.leave()

    def _hook(self) -> None:
        running.enter(self.layer)


@pytest.fixture(autouse=True)
def _nothing_runs() -> Iterator[None]:
    running.forget()
    running.expect_interception()
    yield
    running.forget()
    running.expect_interception()


@given(calls=st.recursive(st.just([]), lambda inner: st.lists(st.tuples(st.integers(0, 2), inner), max_size=3)))
def test_within_and_after_every_nested_forward_the_layer_is_the_one_whose_code_runs(
    calls: list[tuple[int, list[object]]],
) -> None:
    def run(inside: list[tuple[int, list[object]]], caller: WatchedLayer | None) -> None:
        assert running.layer_of_this_call() is caller
        for number, inner in inside:
            Hooked(LAYERS[number])(lambda inner=inner, number=number: run(inner, LAYERS[number]))
            assert running.layer_of_this_call() is caller

    run(calls, None)


def test_a_forward_that_was_left_without_its_last_hook_is_over_when_its_frame_is() -> None:
    """KeyboardInterrupt and SystemExit pass by the hook after a forward."""
    interrupted = Hooked(LAYERS[0], after_hook=False)
    interrupted(lambda: None)
    assert running.layer_of_this_call() is None

    def inside() -> None:
        interrupted(lambda: None)
        assert running.layer_of_this_call() is LAYERS[1]

    Hooked(LAYERS[1])(inside)
    assert running.layer_of_this_call() is None


def test_a_thread_sees_no_forward_of_another() -> None:
    seen: list[WatchedLayer | None] = []

    def elsewhere() -> None:
        seen.append(running.layer_of_this_call())
        Hooked(LAYERS[1])(lambda: seen.append(running.layer_of_this_call()))

    def inside() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert running.layer_of_this_call() is LAYERS[0]

    Hooked(LAYERS[0])(inside)
    assert seen == [None, LAYERS[1]]


def test_what_is_computed_again_belongs_to_its_layer_and_what_ran_before_goes_on_even_after_an_error() -> None:
    def inside() -> None:
        with running.again_in(LAYERS[2]):
            assert running.layer_of_this_call() is LAYERS[2]
            Hooked(LAYERS[1])(lambda: None)
            assert running.layer_of_this_call() is LAYERS[2]
        assert running.layer_of_this_call() is LAYERS[0]
        with pytest.raises(RuntimeError, match="lost"), running.again_in(LAYERS[2]):
            raise RuntimeError("lost")
        assert running.layer_of_this_call() is LAYERS[0]

    Hooked(LAYERS[0])(inside)
    assert running.layer_of_this_call() is None


def test_a_call_that_was_met_is_told_until_the_next_is_expected() -> None:
    assert not running.was_intercepted()
    running.note_interception()
    assert running.was_intercepted()
    running.expect_interception()
    assert not running.was_intercepted()


@pytest.mark.parametrize("under", ["vmap", "forward mode", "a tracer"])
def test_what_transforms_or_traces_a_model_sees_it_without_us(under: str) -> None:
    seen: list[WatchedLayer | None] = []

    def looked(x: torch.Tensor) -> torch.Tensor:
        seen.append(running.layer_of_this_call())
        return x * 2

    def inside() -> None:
        if under == "vmap":
            torch.func.vmap(looked)(torch.ones(2))
        elif under == "forward mode":
            with torch.autograd.forward_ad.dual_level():
                looked(torch.ones(2))
        else:
            torch.fx.experimental.proxy_tensor.make_fx(looked)(torch.ones(2))
        seen.append(running.layer_of_this_call())

    Hooked(LAYERS[0])(inside)
    if under == "a tracer":
        assert seen[-1] is LAYERS[0]  # make_fx runs the function as it is; only torch.jit's tracer has a state
    else:
        assert seen == [None, LAYERS[0]]


def attention() -> None:
    """Stands for PyTorch's, as it is met outside every watched forward."""
    running.note_call_outside(CALLED, CALLED)


class Direct(nn.Module):
    """A module whose code is called past its hooks."""

    def forward(self) -> None:
        attention()


def test_a_call_outside_is_counted_and_the_module_whose_code_it_is_is_named() -> None:
    attention()
    attention()
    assert running.outside.calls == 2
    module, layer = Direct(), made("h.9")
    setattr(module, LAYER_ATTRIBUTE, layer)
    module.forward()
    assert running.outside.calls == 3
    [reason] = layer.unserved
    assert "call the module itself" in reason
    running.forget()
    assert running.outside.calls == 0


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
                running.note_call_outside(CALLED, CALLED)
            return grads[0]

    def backward() -> None:
        out = Recomputes.apply(torch.ones(2, requires_grad=True))  # type: ignore[no-untyped-call]
        out.sum().backward()

    running.outside.layers.add(kept)
    try:
        backward()  # kept as it is: nothing is lost but the count
        assert running.outside.calls == 1
        assert not caplog.records
        running.outside.calls = 0
        running.outside.layers.add(served)
        backward()
        (warned,) = caplog.messages
        assert "attention is recomputed in a backward" in warned
        assert "Use torch.utils.checkpoint" in warned
    finally:
        running.outside.layers.discard(kept)
        running.outside.layers.discard(served)
